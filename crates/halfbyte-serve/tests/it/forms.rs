//! Answers of a form: JSON schemas, and calls of tools.

use crate::support::{Running, TEMPLATE, TOOLS, served};
use halfbyte_llm::schedule::Options;
use halfbyte_serve::Settings;
use serde_json::{Value, json};

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
