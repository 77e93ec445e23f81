//! What is written: the same as without a server, in the forms that clients ask for.

use crate::support::{Running, TEMPLATE, alone, served};
use halfbyte_llm::Tokenizer;
use halfbyte_llm::schedule::Options;
use halfbyte_serve::Settings;
use serde_json::{Value, json};

fn text(choice: &Value) -> String {
    choice["text"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_are_what_the_model_writes_alone() {
    let options = Options { batch_invariant: true, ..Options::default() };
    let server = Running::start(vec![served("m", None, options)], Settings::default()).await;
    let prompts: Vec<String> = ["def read(path):", "import os\n", "class Écran:"].map(str::to_owned).into();
    let want = alone(&prompts.iter().map(|prompt| (prompt.clone(), 24)).collect::<Vec<_>>());
    let body = json!({"model": "m", "prompt": prompts, "max_tokens": 24, "temperature": 0});
    let whole = server.post("/v1/completions", &body).await.good();
    assert_eq!(whole["choices"].as_array().unwrap().iter().map(text).collect::<Vec<_>>(), want);
    assert_eq!((whole["object"].as_str(), whole["model"].as_str()), (Some("text_completion"), Some("m")));
    let usage = &whole["usage"];
    assert_eq!(usage["completion_tokens"], 72);
    assert_eq!(usage["total_tokens"].as_u64().unwrap(), 72 + usage["prompt_tokens"].as_u64().unwrap());

    // As a stream: the same, in pieces, with what was read and written at the end.
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let mut events = server.post("/v1/completions", &streamed).await.events();
    assert_eq!(events.pop().unwrap()["usage"], *usage);
    assert!(events.iter().all(|event| event.get("usage") == Some(&Value::Null)));
    let mut texts = vec![String::new(); 3];
    let mut finished = 0;
    for event in &events {
        let choice = &event["choices"][0];
        texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
        finished += usize::from(choice["finish_reason"] == "length");
    }
    assert_eq!((texts, finished), (want.clone(), 3));
    assert!(events.len() > 20);

    // Tokens in the place of a text, what is said before it, and a text that ends it.
    let ids = Tokenizer::from_folder(&crate::support::folder()).unwrap().encode_prompt(&prompts[0], Some(0)).unwrap();
    let answer = server
        .post("/v1/completions", &json!({"prompt": ids, "max_tokens": 24, "temperature": 0, "echo": true}))
        .await
        .good();
    assert_eq!(text(&answer["choices"][0]), format!("{}{}", prompts[0], want[0]));
    let stop = &want[0][want[0].find('\n').unwrap() + 1..][..4];
    let body = json!({"prompt": prompts[0], "max_tokens": 24, "temperature": 0, "stop": ["never", stop]});
    let choice = &server.post("/v1/completions", &body).await.good()["choices"][0];
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(text(choice), want[0].split(stop).next().unwrap());
    server.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_of_no_tokens_are_their_prompts() {
    let server = Running::with(Settings::default()).await;
    let prompts = json!(["def read(path):", "import os"]);
    for (echo, expected) in [(true, ["def read(path):", "import os"]), (false, [""; 2])] {
        let mut body = json!({"prompt": prompts, "max_tokens": 0, "echo": echo});
        let whole = server.post("/v1/completions", &body).await.good();
        let choices = whole["choices"].as_array().unwrap();
        assert_eq!(choices.iter().map(text).collect::<Vec<_>>(), expected);
        assert!(choices.iter().all(|choice| choice["finish_reason"] == "length"), "{whole}");
        let usage = &whole["usage"];
        assert!(usage["prompt_tokens"].as_u64().unwrap() > 2, "{usage}");
        assert_eq!((&usage["completion_tokens"], &usage["total_tokens"]), (&json!(0), &usage["prompt_tokens"]));

        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let mut events = server.post("/v1/completions", &body).await.events();
        assert_eq!(events.pop().unwrap()["usage"], *usage);
        let mut texts = [String::new(), String::new()];
        let mut finished = 0;
        for event in &events {
            let choice = &event["choices"][0];
            texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
            finished += usize::from(choice["finish_reason"] == "length");
        }
        assert_eq!((texts.each_ref().map(String::as_str), finished), (expected, 2));
    }
    server.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn draws_penalties_biases_and_logarithms() {
    let server = Running::with(Settings::default()).await;
    let ask = async |more: Value| {
        let mut body = json!({"prompt": "def ", "max_tokens": 12});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", &body).await.good()
    };
    let texts = |answer: &Value| answer["choices"].as_array().unwrap().iter().map(text).collect::<Vec<_>>();
    // The same seed, the same draws; choices of a request differ, and so do requests without a seed.
    let drawn =
        texts(&ask(json!({"seed": 5, "n": 3, "temperature": 1.2, "top_p": 0.95, "top_k": 100, "min_p": 0.001})).await);
    let again =
        texts(&ask(json!({"seed": 5, "n": 3, "temperature": 1.2, "top_p": 0.95, "top_k": 100, "min_p": 0.001})).await);
    assert_eq!(drawn, again);
    assert!(drawn[0] != drawn[1] || drawn[1] != drawn[2]);
    let free = (texts(&ask(json!({"temperature": 2})).await), texts(&ask(json!({"temperature": 2})).await));
    assert_ne!(free.0, free.1);
    // Equal prompts of a request are other texts too.
    let equal = texts(&ask(json!({"prompt": ["def ", "def "], "n": 2, "temperature": 1.2, "max_tokens": 16})).await);
    assert!(equal.len() == 4 && (0..4).all(|at| !equal[..at].contains(&equal[at])), "{equal:?}");
    // A bias that decides, penalties that let nothing come twice.
    let tokenizer = Tokenizer::from_folder(&crate::support::folder()).unwrap();
    let word = tokenizer.encode(" self").unwrap()[0];
    let biased = ask(json!({"logit_bias": {word.to_string(): 100}, "temperature": 0, "max_tokens": 3})).await;
    assert_eq!(texts(&biased), [" self self self"]);
    let bias: Value = [word.to_string(), "500".to_owned(), "600".to_owned(), "700".to_owned()]
        .into_iter()
        .map(|id| (id, json!(50)))
        .collect();
    let varied = ask(json!({"logit_bias": bias, "temperature": 0, "max_tokens": 4, "presence_penalty": 2, "frequency_penalty": 2, "logprobs": 1})).await;
    let tokens = varied["choices"][0]["logprobs"]["tokens"].as_array().unwrap().clone();
    assert_eq!(tokens.len(), 4);
    // Logarithms are the model's own: the likeliest first, at most 0, before any temperature.
    let told = ask(json!({"temperature": 0, "logprobs": 3})).await;
    let told = &told["choices"][0]["logprobs"];
    for (chosen, top) in told["token_logprobs"].as_array().unwrap().iter().zip(told["top_logprobs"].as_array().unwrap())
    {
        let top = top.as_object().unwrap().values().filter_map(Value::as_f64).fold(f64::NEG_INFINITY, f64::max);
        assert!(chosen.as_f64() == Some(top) && top <= 0.0);
    }
    assert_eq!(
        told["tokens"].as_array().unwrap().iter().filter_map(Value::as_str).collect::<String>(),
        texts(&ask(json!({"temperature": 0})).await)[0]
    );
    server.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn logarithms_of_tokens_that_are_parts_of_characters() {
    let server = Running::with(Settings::default()).await;
    let bytes = Tokenizer::from_folder(&crate::support::folder()).unwrap().bytes_of_tokens().unwrap();
    let id = |of: &[u8]| bytes.iter().position(|token| token.bytes == of).unwrap().to_string();
    let bias = json!({id(b"\xc3"): 91, id(b"\xa9"): 91, id(b"x"): 100});
    let mut body = json!({
        "prompt": "def ", "max_tokens": 60, "seed": 1, "temperature": 2, "frequency_penalty": 2, "logit_bias": bias, "logprobs": 20,
    });
    let mut whole = server.post("/v1/completions", &body).await.good();
    let choice = whole["choices"][0].take();
    let (text, told) = (text(&choice), &choice["logprobs"]);
    let text: Vec<char> = text.chars().collect();
    let list = |name: &str| told[name].as_array().unwrap().clone();
    let names: Vec<String> = list("tokens").iter().map(|name| name.as_str().unwrap().to_owned()).collect();
    let offsets: Vec<usize> = list("text_offset").iter().map(|at| at.as_u64().unwrap() as usize).collect();
    let (first, last) = ("bytes:\\xc3", "bytes:\\xa9");
    assert!([first, last, "x"].iter().all(|name| names.iter().any(|known| known == name)), "{names:?}");
    let mut characters = 0;
    for (at, name) in names.iter().enumerate() {
        if name == "x" {
            assert_eq!(text[offsets[at]], 'x', "{names:?} {offsets:?}");
        }
        if at > 0 && names[at - 1] == first && name == last {
            assert_eq!(text[offsets[at]], 'é', "{names:?} {offsets:?}");
            assert!(at < 2 || names[at - 2] != "x" || offsets[at - 1] == offsets[at], "{names:?} {offsets:?}");
            characters += 1;
        }
    }
    assert!(characters > 0, "{names:?}");
    // The chosen token is there, under its name, with its own logarithm; beside 20 others at most.
    for ((name, chosen), top) in names.iter().zip(list("token_logprobs")).zip(list("top_logprobs")) {
        let top = top.as_object().unwrap();
        assert!(top[name] == chosen && (2..=21).contains(&top.len()), "{name} {chosen} {top:?}");
    }
    // Without others it is there alone, and a stream says the same.
    body["logprobs"] = json!(0);
    let alone = server.post("/v1/completions", &body).await.good();
    let alone = &alone["choices"][0]["logprobs"];
    assert!(alone["top_logprobs"].as_array().unwrap().iter().all(|top| top.as_object().unwrap().len() == 1));
    body["stream"] = json!(true);
    let events = server.post("/v1/completions", &body).await.events();
    let streamed = events.iter().filter_map(|event| event["choices"][0]["logprobs"]["text_offset"].as_array());
    assert_eq!(&streamed.flatten().cloned().collect::<Value>(), &alone["text_offset"]);
    server.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_by_the_template_whole_and_streamed() {
    let options = Options { batch_invariant: true, ..Options::default() };
    let models = vec![served("m", Some(TEMPLATE), options), served("plain", None, options)];
    let server = Running::start(models, Settings::default()).await;
    let prompt = "<|endoftext|># system: Be brief.\n# user: hello\ndef ".replace("<|endoftext|>", "");
    let want = alone(&[(prompt, 20)]).remove(0);
    let turns = json!([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]);
    let body = json!({"model": "m", "messages": turns, "max_completion_tokens": 20, "temperature": 0, "logprobs": true, "top_logprobs": 2});
    let whole = server.post("/v1/chat/completions", &body).await.good();
    let choice = &whole["choices"][0];
    assert_eq!(
        (choice["message"]["content"].as_str(), choice["message"]["role"].as_str()),
        (Some(want.as_str()), Some("assistant"))
    );
    assert_eq!((whole["object"].as_str(), choice["finish_reason"].as_str()), (Some("chat.completion"), Some("length")));
    let told = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(told.len(), 20);
    let bytes: Vec<u8> =
        told.iter().flat_map(|one| one["bytes"].as_array().unwrap()).map(|b| b.as_u64().unwrap() as u8).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), want);
    assert!(told.iter().all(|one| one["top_logprobs"].as_array().unwrap().len() == 2));

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = server.post("/v1/chat/completions", &streamed).await.events();
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let said: String = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(said, want);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    assert!(events.iter().all(|event| event["object"] == "chat.completion.chunk" && event["id"] == events[0]["id"]));

    let refused = json!({"model": "m", "messages": [{"role": "user", "content": "no"}]});
    let answer = server.post("/v1/chat/completions", &refused).await;
    assert_eq!(answer.error().1.as_deref(), Some("messages"));
    assert!(answer.text().contains("I will not") && !answer.text().contains("stdlib-11m"), "{}", answer.text());
    let refused = json!({"model": "plain", "messages": turns});
    let (status, param, code) = server.post("/v1/chat/completions", &refused).await.error();
    assert_eq!((status, param.as_deref(), code.as_deref()), (400, Some("model"), Some("no_chat_template")));
    let unnamed = json!({"messages": turns});
    assert_eq!(server.post("/v1/chat/completions", &unnamed).await.error().1.as_deref(), Some("model"));
    server.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn embeddings_are_of_length_one_and_alike_where_texts_are() {
    let server = Running::with(Settings::default()).await;
    let texts = ["import os", "import sys", "It is a truth that is acknowledged by all."];
    let answer = server.post("/v1/embeddings", &json!({"model": "m", "input": texts})).await.good();
    let vectors: Vec<Vec<f64>> = answer["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| serde_json::from_value(one["embedding"].clone()).unwrap())
        .collect();
    assert!(vectors.iter().all(|v| v.len() == 384 && (v.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-4));
    let like = |a: usize, b: usize| vectors[a].iter().zip(&vectors[b]).map(|(x, y)| x * y).sum::<f64>();
    assert!(like(0, 1) > like(0, 2), "{} {}", like(0, 1), like(0, 2));
    let one = json!({"model": "m", "input": texts[0], "encoding_format": "base64"});
    let encoded = server.post("/v1/embeddings", &one).await.good()["data"][0]["embedding"].as_str().unwrap().to_owned();
    assert_eq!(encoded.len(), (384usize * 4).div_ceil(3) * 4);
    for empty in [json!(""), json!([]), json!([[]]), json!(["x", ""]), json!([[7], []])] {
        let (status, param, code) = server.post("/v1/embeddings", &json!({"input": empty})).await.error();
        assert_eq!((status, param.as_deref(), code.as_deref()), (400, Some("input"), Some("invalid_value")), "{empty}");
    }
    let bad = json!({"model": "m", "input": "x", "dimensions": 3});
    assert_eq!(server.post("/v1/embeddings", &bad).await.error().1.as_deref(), Some("dimensions"));
    server.finish().await;
}
