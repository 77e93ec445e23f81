//! Conversations, tokens as they come, and how likely they were.

use crate::support::{copy_of_model, fails, halfbyte, json, model, number, quiet, text};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}\
    {% if messages[0].content == 'no' %}{{ raise_exception('I will not') }}{% endif %}{% if add_generation_prompt %}def {% endif %}";

fn objects(out: &str) -> Vec<Value> {
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_conversation_reads_what_is_new_only() {
    let here = TempDir::new().unwrap();
    let copy = copy_of_model(here.path());
    let m = copy.display().to_string();
    let error = fails(3, &["run", &m, "--chat", "-p", "hello"]);
    assert!(error.contains("no chat template"), "{error}");
    fs::write(copy.join("chat_template.jinja"), TEMPLATE).unwrap();

    let chat = ["run", &m, "--chat", "-n", "12", "--stop", "\n", "--quiet"];
    let talk = |lines: &str, more: &[&str]| {
        let mut child = halfbyte(&[&chat[..], more].concat())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        let out = child.wait_with_output().unwrap();
        assert_eq!((out.status.code(), text(&out.stderr).as_str()), (Some(0), ""), "{more:?}");
        text(&out.stdout)
    };
    let lines = "read a file\n\nwrite it\r\nclose";
    let turns = objects(&talk(lines, &["--json", "--system", "Be brief."]));
    assert_eq!(turns.len(), 3);
    assert_eq!(turns[0]["kept_tokens"], 0);
    // What both renderings begin with is kept: at least the turns before, but for the beginning of the answer.
    for (before, turn) in turns.iter().zip(&turns[1..]) {
        let (kept, read) = (number(turn, "kept_tokens"), number(turn, "prompt_tokens"));
        assert!(kept >= number(before, "prompt_tokens") - 3.0 && kept < read, "{before}\n{turn}");
    }
    let answers: Vec<&str> = turns.iter().map(|turn| turn["text"].as_str().unwrap()).collect();
    assert!(answers.iter().all(|answer| !answer.is_empty() && !answer.contains('\n')));
    assert_eq!(talk(lines, &["--system", "Be brief."]), format!("{}\n", answers.join("\n")));
    // The same text as one prompt.
    let prompt =
        format!("# system\nBe brief.\n# user\nread a file\n# assistant\n{}\n# user\nwrite it\ndef ", answers[0]);
    let whole = json(&["run", &m, "-p", &prompt, "-n", "12", "--stop", "\n"]);
    assert_eq!((&whole["text"], &whole["prompt_tokens"]), (&turns[1]["text"], &turns[1]["prompt_tokens"]));

    let one = quiet(&["run", &m, "--chat", "-n", "12", "--stop", "\n", "-p", "read a file", "--system", "Be brief."]);
    assert_eq!(one, format!("{}\n", answers[0]));
    let error = fails(3, &["run", &m, "--chat", "-p", "no"]);
    assert!(error.contains("I will not"), "{error}");
    fails(2, &["run", &m, "--chat", "-p", "a long story", "--context", "4"]);
    fails(2, &["run", &m, "-p", "x", "--system", "Be brief."]);
}

/// Where no room is left, the message is one that can be followed: nobody can shorten what was said.
#[test]
fn a_conversation_that_is_full_says_so() {
    let here = TempDir::new().unwrap();
    let copy = copy_of_model(here.path());
    fs::write(copy.join("chat_template.jinja"), TEMPLATE).unwrap();
    let m = copy.display().to_string();
    for tp in ["1", "2"] {
        let args = ["run", &m, "--chat", "-n", "30", "--context", "48", "--tp", tp, "--quiet"];
        let mut child =
            halfbyte(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"read a file\nwrite it to another place\nclose\n").unwrap();
        let out = child.wait_with_output().unwrap();
        let error = text(&out.stderr);
        assert_eq!(out.status.code(), Some(3), "{error}");
        assert!(error.contains("no room for this turn") && error.contains("more --context"), "{error}");
        assert!(!text(&out.stdout).is_empty());
    }
}

#[test]
fn a_conversation_goes_on_with_tools() {
    let here = TempDir::new().unwrap();
    let copy = copy_of_model(here.path());
    let m = copy.display().to_string();
    let template = "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}\
        {% for c in m.tool_calls or [] %} {{ c.function.arguments | tojson }}{% endfor %}{{ '\n' }}{% endfor %}def ";
    fs::write(copy.join("chat_template.jinja"), template).unwrap();
    let file = |name: &str, text: &str| {
        let path = here.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let said = r#"[{"role": "user", "content": "u"}, {"role": "assistant", "content": "c", "tool_calls":
        [{"function": {"name": "f", "arguments": "{\"x\": 1}"}}]}, {"role": "tool", "content": "t"}]"#;
    let listed =
        r#"[{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]"#;
    let (messages, tools) = (file("messages.json", said), file("tools.json", listed));
    let chat = ["run", &m, "--chat", "-n", "6", "--messages", &messages];
    // The same text as a prompt. Nothing is read from standard input, as the last turn waits for an answer.
    let same = |prompt: &str, more: &[&str]| {
        let [whole, answer] = [json(&["run", &m, "-p", prompt, "-n", "6"]), json(&[&chat[..], more].concat())];
        assert_eq!((&answer["text"], &answer["prompt_tokens"]), (&whole["text"], &whole["prompt_tokens"]), "{prompt}");
    };
    let turns = "user: u\nassistant: c {\"x\": 1}\ntool: t\n";
    same(&format!("{turns}def "), &[]);
    same(&format!("f g {turns}user: more\ndef "), &["--tools", &tools, "-p", "more"]);
    let bad = file("bad.json", r#"{"messages": [{"content": 1}]}"#);
    let error = fails(3, &["run", &m, "--chat", "--messages", &bad]);
    assert!(error.contains("messages[0]") && error.contains("role"), "{error}");
    let error = fails(3, &["run", &m, "--chat", "-p", "x", "--tools", &bad]);
    assert!(error.contains("tools") && error.contains("list of objects"), "{error}");
    let unnamed = file("unnamed.json", r#"[{"type": "function", "function": {"name": "f"}}, {"name": "g"}]"#);
    let error = fails(3, &["run", &m, "--chat", "-p", "x", "--tools", &unnamed]);
    assert!(error.contains("tools[1].type: expected \"function\", got nothing"), "{error}");
    fails(2, &["run", &m, "-p", "x", "--tools", &tools]);
    fails(2, &["run", &m, "--chat", "--messages", &messages, "--system", "Be brief."]);
    fs::write(&tools, "[").unwrap();
    let error = fails(3, &["run", &m, "--chat", "-p", "x", "--tools", &tools]);
    assert!(error.contains("holds no tools"), "{error}");
    assert!(fails(2, &["run", &m, "-p", "x", "--stop", ""]).contains("--stop"));
    assert!(fails(2, &["run", &m, "-p", "x", "--temperature", "-1"]).contains("temperature"));
}

#[test]
fn tokens_come_one_a_line_and_with_how_likely_they_were() {
    let m = model();
    let options = ["run", &m, "-p", "def read(self", "-n", "6"];
    let whole = json(&[&options[..], &["--logprobs", "3"]].concat());
    let lines = objects(&quiet(&[&options[..], &["--json", "--stream", "--logprobs", "3"]].concat()));
    let (last, tokens) = lines.split_last().unwrap();
    assert_eq!((&last["text"], &last["tokens"], &last["finish"]), (&whole["text"], &whole["tokens"], &"length".into()));
    assert!(last.get("logprobs").is_none() && last["schema"] == 1);
    let ids: Vec<Value> = tokens.iter().filter(|t| !t["token"].is_null()).map(|t| t["token"].clone()).collect();
    assert_eq!(&Value::Array(ids), &whole["tokens"]);
    let streamed: String = tokens.iter().map(|token| token["text"].as_str().unwrap()).collect();
    assert_eq!(streamed, whole["text"].as_str().unwrap());
    for (line, token) in tokens.iter().zip(whole["logprobs"].as_array().unwrap()) {
        assert_eq!((&line["logprob"], &line["top"]), (&token["logprob"], &token["top"]));
        let top: Vec<f64> = token["top"].as_array().unwrap().iter().map(|likely| number(likely, "logprob")).collect();
        // Greedy: the chosen one is the most likely, and told as it stands in the text.
        assert_eq!((&token["top"][0]["token"], &token["top"][0]["text"]), (&token["token"], &token["text"]));
        assert!(top.len() == 3 && top[0] == number(token, "logprob") && top.is_sorted_by(|a, b| a >= b), "{token}");
        assert!(top.iter().map(|p| p.exp()).sum::<f64>() <= 1.0 && top[0] < 0.0, "{token}");
    }
    fails(2, &["run", &m, "-p", "x", "--stream"]);
    fails(2, &["run", &m, "-p", "x", "--min-p", "2"]);
    for penalty in ["1e-40", "0.009", "10.1", "nan", "inf"] {
        assert!(fails(2, &["run", &m, "-p", "x", "--repetition-penalty", penalty]).contains("0.01 to 10"), "{penalty}");
    }
    let again = quiet(&["run", &m, "-p", "x = x = x =", "-n", "24"]);
    assert_ne!(quiet(&["run", &m, "-p", "x = x = x =", "-n", "24", "--repetition-penalty", "1.5"]), again);
}

#[test]
fn many_prompts_have_the_texts_of_each_alone() {
    let (m, here) = (model(), TempDir::new().unwrap());
    let prompts = ["def read(self", "", "import os", "class Writer:", "    return", "x = ["];
    let file = here.path().join("prompts.txt").display().to_string();
    fs::write(&file, prompts.join("\n")).unwrap();
    let many = ["run", &m, "--prompts", &file, "-n", "8", "--batch-invariant", "--parallel", "3"];
    for positions in ["128", "1024"] {
        let texts = objects(&quiet(&[&many[..], &["--json", "--positions", positions]].concat()));
        assert_eq!(texts.len(), prompts.len());
        for (i, (text, prompt)) in texts.iter().zip(prompts).enumerate() {
            let alone = json(&["run", &m, "-p", prompt, "-n", "8"]);
            assert_eq!(text["index"], i);
            for field in ["text", "tokens", "finish", "prompt_tokens"] {
                assert_eq!(text[field], alone[field], "{prompt}: {field}");
            }
        }
    }
    let told = quiet(&many);
    assert_eq!(told.lines().count(), prompts.len());
    fs::write(&file, format!("\u{feff}{}", prompts.join("\n"))).unwrap();
    assert_eq!(quiet(&many), told, "a mark of UTF-8 is no text");
    fs::write(&file, format!("a\nb\n{}\nc", "x ".repeat(400))).unwrap();
    let error = fails(2, &[&many[..], &["--positions", "128"]].concat());
    assert!(error.contains("at most 128 tokens") && error.contains("line 3 of") && error.contains(&file), "{error}");
    fs::write(&file, format!("a\n{}", "word ".repeat(3000))).unwrap();
    let error = fails(2, &many);
    assert!(error.contains("line 2 of") && error.contains(&file), "{error}");
    fails(2, &["run", &m, "-p", "x", "--parallel", "3"]);
    fails(2, &["run", &m, "--chat", "--prompts", &file]);
    fails(2, &["run", &m, "--prompts", &file, "--system", "x"]);
}

#[cfg(unix)]
#[test]
fn an_interrupt_ends_many_texts_before_the_first_is_done() {
    let here = TempDir::new().unwrap();
    let file = here.path().join("prompts.txt").display().to_string();
    fs::write(&file, "def \n".repeat(64)).unwrap();
    let many = ["run", &model(), "--prompts", &file, "-n", "1000", "--parallel", "64"];
    let child = halfbyte(&many).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let out = child.wait_with_output().unwrap();
    assert_eq!((out.status.code(), text(&out.stdout).as_str()), (Some(130), ""), "{}", text(&out.stderr));
}
