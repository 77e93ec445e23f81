//! Chat templates: what Python's jinja2 makes of them, and templates that lie.

use halfbyte_checkpoint::Weights;
use halfbyte_llm::chat::{ChatTemplate, Conversation, Message, SpecialTokens};
use halfbyte_llm::{Config, Error, Tokenizer};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/chat")
}

fn template(source: &str) -> halfbyte_llm::Result<ChatTemplate> {
    ChatTemplate::parse(source.to_owned(), SpecialTokens::default(), Path::new("model"))
}

fn says(source: &str) -> String {
    let messages = [Message::new("user", "x".repeat(1000)), Message::new("assistant", "y")];
    match template(source).and_then(|template| template.render_messages(&messages, true)) {
        Err(Error::Chat { what, .. }) => what,
        other => panic!("{source}: {:?}", other.map(|text| text.len())),
    }
}

#[test]
fn templates_write_what_jinja2_writes() {
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(folder().join("expected.json")).unwrap()).unwrap();
    let (mut written, mut refused) = (0, 0);
    for case in &cases {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let name = text(&case["template"]).unwrap();
        let (bos, eos) = (text(&case["tokens"]["bos_token"]), text(&case["tokens"]["eos_token"]));
        let tokens = SpecialTokens { bos, eos, ..SpecialTokens::default() };
        let source = std::fs::read_to_string(folder().join(&name)).unwrap();
        let template = ChatTemplate::parse(source, tokens, Path::new(&name)).unwrap();
        let messages = case["messages"].as_array().unwrap().iter();
        let conversation = Conversation {
            messages: messages.map(|message| Message::from_json(message.clone()).unwrap()).collect(),
            tools: case.get("tools").cloned(),
            documents: case.get("documents").cloned(),
        };
        let got = template.render(&conversation, case["answer"].as_bool().unwrap());
        match text(&case["text"]) {
            Some(expected) => {
                assert_eq!(got.unwrap(), expected, "{case}");
                written += 1;
            }
            None => {
                let got = got.unwrap_err().to_string();
                let want = case["error"].as_str().unwrap();
                let both_miss = ["undefined", "eos_token"].iter().all(|word| want.contains(word) && got.contains(word));
                assert!(got.contains(want) || both_miss, "{got}: {case}");
                refused += 1;
            }
        }
    }
    assert!(written > 250 && refused > 10, "{written} written, {refused} refused");
}

#[test]
fn ends_of_lines_are_those_of_jinja2() {
    let source = "{% for m in messages %}\r\n{{ m.role }}:\r\n{{ m.content }}\r\n{% endfor %}\r\nend\r";
    let written = template(source).unwrap().render_messages(&[Message::new("user", "a\r\nb")], false).unwrap();
    assert_eq!(written, "user:\na\r\nb\nend");
}

/// What Jinja2 3.1.6 with markupsafe 3.0.3 and transformers' `tojson` write.
#[test]
fn what_is_escaped_has_the_entities_of_jinja2() {
    let content = "<a href=\"x\">it's &amp; é/</a>";
    let escaped = "&lt;a href=&#34;x&#34;&gt;it&#39;s &amp;amp; é/&lt;/a&gt;";
    for (source, expected) in [
        ("{{ messages[0].content | e }}", escaped),
        ("{{ messages[0].content | escape | e }}", escaped),
        ("{% autoescape true %}{{ messages[0].content }}{% endautoescape %}", escaped),
        ("{% autoescape true %}{{ messages[0].content | e }}{% endautoescape %}", escaped),
        ("{% autoescape true %}{{ 'x' | tojson }}{{ '<b>' | safe }}{{ 1.5 }}{% endautoescape %}", "&#34;x&#34;<b>1.5"),
        ("{{ messages[0].content | e | length }}", "57"),
        (
            "{{ ['a', '<'] | e }} {{ 1.5e-7 | e }} {{ none | e }} {{ true | e }}[{{ missing | e }}] {{ 7 | e }}",
            "[&#39;a&#39;, &#39;&lt;&#39;] 1.5e-07 None True[] 7",
        ),
        ("{{ {'a': \"it's\"} | tojson | e }}", "{&#34;a&#34;: &#34;it&#39;s&#34;}"),
        ("{{ '<' | safe | e }}", "<"),
    ] {
        let written = template(source).unwrap().render_messages(&[Message::new("user", content)], false).unwrap();
        assert_eq!(written, expected, "{source}");
    }
}

#[test]
fn templates_that_never_end_or_grow_are_refused() {
    let endless = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}";
    let doubled = format!("{{% set x = messages[0].content %}}{}", "{% set x = x ~ x %}".repeat(60));
    let captured = format!("{{% set x = 'ab' %}}{}", "{% set x %}{{ x }}{{ x }}{% endset %}".repeat(60));
    let listed =
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}";
    let replaced =
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}";
    let joined =
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}";
    for source in [endless, &doubled, &captured, replaced, joined] {
        let what = says(source);
        assert!(what.contains("more steps or memory"), "{source}: {what}");
    }
    assert!(says(listed).contains("comes to an end within 10 seconds"), "{}", says(listed));
    let long = "{% for i in range(3000) %}{{ messages[0].content }}{% endfor %}";
    assert!(says(long).contains("in proportion to the conversation"), "{}", says(long));
    let repeated = says("{{ 'x' * 1000000000000 }}");
    assert!(repeated.contains("more steps or memory"), "{repeated}");
    let calls = says("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}");
    assert!(calls.contains("recursion"), "{calls}");
    let nested = "{% set ns = namespace(x=[]) %}{% for i in range(20000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}";
    assert!(says(nested).contains("levels") || says(nested).contains("steps"), "{}", says(nested));
    let deep = format!("{{{{ {}1{} }}}}", "(".repeat(100_000), ")".repeat(100_000));
    assert!(says(&deep).contains("syntax error"), "{}", says(&deep));
    assert!(says(&"x".repeat((1 << 20) + 1)).contains("at most 1048576 bytes"));
}

#[test]
fn what_is_wrong_with_a_template_is_told_with_its_line() {
    assert!(says("a\n{% if %}").contains("line 2"), "{}", says("a\n{% if %}"));
    assert!(says("\n{{ raise_exception('no ' ~ messages[1].content) }}").contains("no y (line 2)"));
    assert!(says("{{ nothing.at.all }}").contains("undefined"));
    assert!(says("{{ messages | grand }}").contains("grand"));
    assert!(says("{{ strftime_now('%Q%') }}").contains("line 1"));
    let year = template("{{ strftime_now('%Y') }}").unwrap().render_messages(&[], false).unwrap();
    assert!(year.len() == 4 && year.parse::<u32>().unwrap() >= 2024, "{year}");
}

#[test]
fn a_folder_names_its_template_and_tokens() {
    let model = crate::architecture("llama");
    let here = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(&model).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, here.path().join(path.file_name().unwrap())).unwrap();
    }
    let real = crate::stdlib();
    let tokenizer = Tokenizer::from_folder(&real).unwrap();
    let config = Config { bos: Some(0), ..Config::from_folder(&real).unwrap() };
    let read = |file: Option<(&str, &str)>| {
        if let Some((name, text)) = file {
            std::fs::write(here.path().join(name), text).unwrap();
        }
        let weights = Weights::open(here.path()).unwrap();
        ChatTemplate::from_weights(&weights, &config, &tokenizer)
    };
    let text = |template: ChatTemplate| template.render_messages(&[Message::new("user", "u")], false).unwrap();
    assert!(read(None).unwrap().is_none());
    let source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}";
    let with = |fields: Value| fields.to_string();
    let read_config = |fields: Value| read(Some(("tokenizer_config.json", &with(fields)))).unwrap();
    assert!(read_config(json!({"bos_token": "<a>"})).is_none());
    // Of the configuration, where the file names none.
    let end = tokenizer.token(0).unwrap();
    assert_eq!(text(read_config(json!({"chat_template": source})).unwrap()), format!("{end}u{end}"));
    let named =
        json!([{"name": "tool_use", "template": "{{ tools | length }}"}, {"name": "default", "template": source}]);
    let fields = json!({"chat_template": named, "bos_token": "<a>", "eos_token": {"content": "<b>", "lstrip": false}});
    let several = read_config(fields).unwrap();
    let with_tools = Conversation { tools: Some(json!([{}, {}])), ..Conversation::default() };
    assert_eq!(several.render(&with_tools, false).unwrap(), "2");
    assert_eq!(text(several), "<a>u<b>");
    // A null names none, and others than the two have names too.
    let source_of_all = "[{{ bos_token }}{{ pad_token }}{{ unk_token }}{{ sep_token is defined }}]";
    let fields =
        json!({"chat_template": source_of_all, "bos_token": null, "pad_token": "<p>", "unk_token": {"content": "<u>"}});
    assert_eq!(text(read_config(fields).unwrap()), "[<p><u>False]");
    let bad = with(json!({"chat_template": source, "eos_token": 7}));
    assert!(read(Some(("tokenizer_config.json", &bad))).unwrap_err().to_string().contains("eos_token"));
    std::fs::write(here.path().join("tokenizer_config.json"), "{\"bos_token\": \"<c>\"}").unwrap();
    let of_file = read(Some(("chat_template.jinja", source))).unwrap().unwrap();
    assert!(of_file.render(&with_tools, false).is_err(), "it needs a message");
    assert_eq!(text(of_file), format!("<c>u{end}"));
    std::fs::create_dir(here.path().join("additional_chat_templates")).unwrap();
    let beside =
        read(Some(("additional_chat_templates/tool_use.jinja", "tools: {{ tools | length }}"))).unwrap().unwrap();
    assert_eq!(beside.render(&with_tools, false).unwrap(), "tools: 2");
}

#[test]
fn what_is_null_is_left_out_unless_the_template_asks_for_it() {
    let message = |json: Value| Message::from_json(json).unwrap();
    let call = message(json!({"role": "assistant", "content": null, "tool_calls": [{"id": "a"}]}));
    let messages = [message(json!({"role": "user", "content": "u"})), call];
    let written = |source: &str| template(source).unwrap().render_messages(&messages, false);
    assert_eq!(written("[{{ messages[1].content }}] {{ 'content' in messages[1] }}").unwrap(), "[] False");
    // As DeepSeek R1's: in transformers it is an error.
    let asks = "{% if messages[1].content is none %}calls{% else %}{{ messages[1].content + '.' }}{% endif %}";
    assert_eq!(written(asks).unwrap(), "calls");
    let refused = written("{{ raise_exception('none' if 'content' in messages[1] else 'nothing') }}").unwrap_err();
    assert!(refused.to_string().contains("nothing"), "{refused}");
}

#[test]
fn conversations_are_read_from_json() {
    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("conversation.json");
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Conversation::from_file(&path)
    };
    let said = r#"[{"role": "user", "content": "u"}, {"role": "assistant", "content": null, "tool_calls": [
        {"function": {"name": "f", "arguments": "{\"b\": 1, \"a\": [2.5]}"}}, {"function": {"name": "g", "arguments": "b c"}}]}]"#;
    let list = read(said).unwrap();
    let source = "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %} {{ c.function.arguments | tojson }}{% endfor %};\
        {% endfor %}{{ tools | tojson }}{{ documents | tojson }}";
    let template = self::template(source).unwrap();
    // Arguments that are JSON in a text are the object, in its order; others stay a text.
    let expected = r#"user;assistant {"b": 1, "a": [2.5]} "b c";"#;
    assert_eq!(template.render(&list, false).unwrap(), format!("{expected}nullnull"));
    let tool = r#"{"type": "function", "function": {"name": "f", "x": 1}}"#;
    let whole =
        read(&format!(r#"{{"tools": [{tool}], "documents": null, "messages": {said}, "model": "m"}}"#)).unwrap();
    assert_eq!(whole.messages, list.messages);
    assert_eq!(template.render(&whole, false).unwrap(), format!("{expected}[{tool}]null"));
    for (text, field) in [
        ("[", "(the whole)"),
        (r#"{"messages": {}}"#, "messages"),
        ("7", "messages"),
        (r#"[{"role": "user"}, {"content": "x"}]"#, "messages[1]"),
        (r#"[{"role": 5}]"#, "messages[0]"),
        (r#"[["role"]]"#, "messages[0]"),
        (r#"{"messages": [], "tools": [1]}"#, "tools"),
        (r#"{"messages": [], "tools": [{"name": "f"}]}"#, "tools[0].type"),
        (r#"{"messages": [], "tools": [{"type": "function"}]}"#, "tools[0].function"),
        (r#"{"messages": [], "tools": [{"type": "function", "function": {"name": "f g"}}]}"#, "tools[0].function.name"),
        (r#"{"messages": [], "documents": {}}"#, "documents"),
        (r#"[{"role": "user", "role": "system"}]"#, "(the whole)"),
    ] {
        match read(text) {
            Err(Error::Config { field: got, .. }) => assert_eq!(got, field, "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    // What is told besides counts among what a text may be in proportion to.
    let tools = json!([{"description": "x".repeat(1 << 20)}]);
    let large = Conversation { tools: Some(tools), ..Conversation::default() };
    let written = self::template("{{ tools | tojson }}{{ tools | tojson }}").unwrap().render(&large, false);
    assert!(written.unwrap().len() > 2 << 20);
}
