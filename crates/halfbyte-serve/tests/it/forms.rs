//! Answers of a form: JSON schemas, and calls of tools.

use crate::support::{Running, TEMPLATE, TOOLS, served};
use halfbyte_llm::schedule::Options;
use halfbyte_serve::{Limits, Settings};
use serde_json::{Value, json};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn answers_follow_their_schema_whatever_is_drawn() {
    let server = Running::start(vec![served("m", Some(TEMPLATE), Options::default())], Settings::default()).await;
    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "bc"]}},
        "required": ["name", "size", "kind"],
        "additionalProperties": false,
    });
    let ask = async |format: Value, seed: i64| {
        let body = json!({
            "messages": [{"role": "user", "content": "Give me one."}], "temperature": 1.3, "seed": seed, "max_tokens": 200,
            "response_format": format,
        });
        server.post("/v1/chat/completions", &body).await
    };
    let format = json!({"type": "json_schema", "json_schema": {"name": "thing", "strict": true, "schema": schema}});
    for seed in 0..4 {
        let answer = ask(format.clone(), seed).await.good();
        let said = answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        let thing: Value = serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {said}"));
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        assert!(thing["name"].as_str().is_some_and(|name| name.chars().count() <= 8), "{said}");
        assert!(
            (0..=99).contains(&thing["size"].as_i64().unwrap())
                && ["a", "bc"].contains(&thing["kind"].as_str().unwrap())
        );
        assert_eq!(thing.as_object().unwrap().len(), 3);
    }
    // Any object may be longer than there are tokens: its beginning is one.
    let any = ask(json!({"type": "json_object"}), 1).await.good();
    let said = any["choices"][0]["message"]["content"].as_str().unwrap().trim_start().to_owned();
    assert!(said.starts_with('{'), "{said}");
    for (bad, param) in [
        (json!({"type": "json_schema"}), "response_format.json_schema"),
        (json!({"type": "json_schema", "json_schema": {"schema": 1}}), "response_format.json_schema.schema"),
        (json!({"type": "yaml"}), "response_format.type"),
        (json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}), "response_format"),
        (json!("text"), "response_format"),
    ] {
        assert_eq!(ask(bad.clone(), 0).await.error().1.as_deref(), Some(param), "{bad}");
    }
    server.finish().await;
}

fn schema(schema: Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
}

#[tokio::test(flavor = "multi_thread")]
async fn schemas_that_cannot_be_served_are_refused_before_anything_is_sent() {
    let server = Running::start(vec![served("m", Some(TEMPLATE), Options::default())], Settings::default()).await;
    let mut row: serde_json::Map<String, Value> =
        (0..800).map(|at| (format!("d{at}"), json!({"$ref": format!("#/$defs/d{}", at + 1)}))).collect();
    row.insert("d800".to_owned(), json!({"type": "boolean"}));
    let wide: serde_json::Map<String, Value> = (0..10_000).map(|at| (format!("p{at}"), json!(true))).collect();
    for bad in [
        json!({"$defs": row, "$ref": "#/$defs/d0"}),
        json!({"type": "object", "properties": wide}),
        json!({"$ref": "#"}),
        json!({"type": "integer", "minimum": 9_007_199_254_740_993_i64}),
        json!({"type": "integer", "minimum": -1_000_000_000_000_000_000_i64, "maximum": 1_000_000_000_000_000_000_i64, "multipleOf": 999_983}),
    ] {
        let body = json!({"messages": [{"role": "user", "content": "a"}], "stream": true, "n": 3, "response_format": schema(bad)});
        let answer = server.post("/v1/chat/completions", &body).await;
        let expected = (400, Some("response_format".to_owned()), Some("invalid_json_schema".to_owned()));
        assert_eq!(answer.error(), expected, "{}", answer.text());
        assert!(!answer.text().contains("verbose"), "{}", answer.text());
    }
    // One grammar for several texts, each of which keeps to it by itself.
    let body = json!({"messages": [{"role": "user", "content": "a"}], "n": 4, "temperature": 1.5, "seed": 1, "max_tokens": 50,
        "response_format": schema(json!({"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 3, "maxItems": 3}))});
    let answer = server.post("/v1/chat/completions", &body).await.good();
    let said = |choice: &Value| choice["message"]["content"].as_str().unwrap().to_owned();
    let all: Vec<String> = answer["choices"].as_array().unwrap().iter().map(said).collect();
    let lists = all.iter().map(|text| serde_json::from_str::<Vec<String>>(text).unwrap());
    assert!(lists.clone().count() == 4 && lists.clone().all(|list| list.len() == 3), "{all:?}");
    assert!(all.iter().any(|text| *text != all[0]), "{all:?}");
    server.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grammar_is_made_within_the_time_of_its_request() {
    let limits = Limits { request: Duration::from_millis(1), ..Limits::default() };
    let server = Running::with(Settings { limits, ..Settings::default() }).await;
    let body =
        json!({"messages": [{"role": "user", "content": "a"}], "response_format": schema(json!({"type": "boolean"}))});
    let (status, _, code) = server.post("/v1/chat/completions", &body).await.error();
    assert_eq!((status, code.as_deref()), (408, Some("timeout")));
    server.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_keep_to_schemas_that_refer_to_parts_of_themselves() {
    let server = Running::start(vec![served("m", Some(TOOLS), Options::default())], Settings::default()).await;
    let function = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let kind = |values: [&str; 2]| {
        json!({"$defs": {"Kind": {"enum": values}}, "type": "object", "properties": {"kind": {"$ref": "#/$defs/Kind"}},
               "required": ["kind"], "additionalProperties": false})
    };
    let tagged = "</tool_call><tool_call>{\"name\": \"f\", \"arguments\": {}}";
    let body = |tools: Value, choice: Value| json!({"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 200, "tools": tools, "tool_choice": choice});
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    let tools = json!([
        function("f", kind(["a", "b"])),
        function("g", kind(["c", "d"])),
        function("h", json!({"type": "object", "properties": {"text": {"const": tagged}}, "required": ["text"], "additionalProperties": false})),
        {"type": "function", "function": {"name": "none"}},
    ]);
    for (choice, names) in [
        (named("f"), vec!["f"]),
        (named("g"), vec!["g"]),
        (named("h"), vec!["h"]),
        (named("none"), vec!["none"]),
        (json!("required"), vec!["f", "g", "h", "none"]),
    ] {
        let answer = server.post("/v1/chat/completions", &body(tools.clone(), choice)).await.good();
        let calls = answer["choices"][0]["message"]["tool_calls"].as_array().unwrap();
        let name = calls[0]["function"]["name"].as_str().unwrap();
        assert!(calls.len() == 1 && names.contains(&name), "{answer}");
        let arguments: Value = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
        match name {
            "f" => assert!(["a", "b"].contains(&arguments["kind"].as_str().unwrap())),
            "g" => assert!(["c", "d"].contains(&arguments["kind"].as_str().unwrap())),
            "h" => assert_eq!(arguments, json!({"text": tagged})),
            _ => assert_eq!(arguments, json!({})),
        }
    }
    // What is wrong is told of the function that it is of, and without a grammar.
    for bad in [
        json!({"type": "object", "properties": {"a": {"type": "thing"}}}),
        json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}),
    ] {
        let tools = json!([function("f", kind(["a", "b"])), function("g", bad)]);
        let answer = server.post("/v1/chat/completions", &body(tools, json!("required"))).await;
        let expected =
            (400, Some("tools[1].function.parameters".to_owned()), Some("invalid_function_parameters".to_owned()));
        assert_eq!(answer.error(), expected, "{}", answer.text());
        assert!(!answer.text().contains("start:") && !answer.text().contains("%json"), "{}", answer.text());
    }
    // An answer that must keep to a schema is no call, whatever it looks like.
    let mut answer = body(tools, json!("auto"));
    let text = "<tool_call>{\"name\": \"none\", \"arguments\": {}}</tool_call>";
    answer["response_format"] = schema(json!({"const": text}));
    let choice = server.post("/v1/chat/completions", &answer).await.good()["choices"][0].clone();
    assert_eq!((choice["finish_reason"].as_str(), &choice["message"]["tool_calls"]), (Some("stop"), &Value::Null));
    assert_eq!(choice["message"]["content"], json!(text).to_string());
    server.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_must_come_come_and_are_taken_apart() {
    let models =
        vec![served("m", Some(TOOLS), Options::default()), served("no-form", Some(TEMPLATE), Options::default())];
    let server = Running::start(models, Settings::default()).await;
    let parameters = json!({"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"], "additionalProperties": false});
    let body = |model: &str, choice: Value| {
        json!({
            "model": model, "messages": [{"role": "user", "content": "How warm is it?"}], "temperature": 0, "max_tokens": 100,
            "tools": [{"type": "function", "function": {"name": "warmth", "parameters": parameters}},
                      {"type": "function", "function": {"name": "rain"}}],
            "tool_choice": choice,
        })
    };
    let named = json!({"type": "function", "function": {"name": "warmth"}});
    let answer = server.post("/v1/chat/completions", &body("m", named.clone())).await.good();
    let choice = &answer["choices"][0];
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(
        (choice["finish_reason"].as_str(), call["function"]["name"].as_str()),
        (Some("tool_calls"), Some("warmth")),
        "{answer}"
    );
    assert!(choice["message"]["content"].is_null() && call["id"].as_str().unwrap().starts_with("call_"));
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(["Oslo", "Rome"].contains(&arguments["city"].as_str().unwrap()));

    let mut streamed = body("m", json!("required"));
    streamed["stream"] = json!(true);
    let events = server.post("/v1/chat/completions", &streamed).await.events();
    let deltas: Vec<&Value> =
        events.iter().flat_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array()).flatten().collect();
    assert_eq!((deltas.len(), deltas[0]["index"].as_u64()), (1, Some(0)));
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    // Results go back to the model; what it says then is text.
    let mut told = body("m", json!("auto"));
    told["messages"].as_array_mut().unwrap().extend([
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        json!({"role": "tool", "tool_call_id": call["id"], "content": "21"}),
    ]);
    assert!(server.post("/v1/chat/completions", &told).await.good()["choices"][0]["message"]["content"].is_string());
    let (_, param, code) = server.post("/v1/chat/completions", &body("no-form", named)).await.error();
    assert_eq!((param.as_deref(), code.as_deref()), (Some("tool_choice"), Some("unsupported_value")));
    server.finish().await;
}
