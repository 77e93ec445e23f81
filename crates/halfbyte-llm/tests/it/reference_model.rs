//! The small real model in `models/` against what another implementation computed from it.

use halfbyte::Format;
use halfbyte::cpu::Cpu;
use halfbyte::quantize::Rtn;
use halfbyte_llm::{Error, Finish, KvType, LoadOptions, Model, Request, Sampler, Sampling, Session, Tokenizer, eval};
use std::ops::ControlFlow;

fn load(options: LoadOptions) -> (Cpu, Model, Tokenizer) {
    let model = Model::load(&crate::stdlib(), &options).unwrap();
    (Cpu::all_threads().unwrap(), model, Tokenizer::from_folder(&crate::stdlib()).unwrap())
}

fn quantized(format: &str) -> LoadOptions {
    let format: Format = format.parse().unwrap();
    LoadOptions { act: format.act, quantize: Some((format.weight, Rtn::default())), ..LoadOptions::default() }
}

fn validation(model: &Model, tokenizer: &Tokenizer) -> Vec<u32> {
    let documents = eval::documents(&crate::stdlib().join("validation.jsonl")).unwrap();
    assert_eq!(documents.len(), 46);
    let tokens = eval::token_stream(tokenizer, &documents, model.config().bos).unwrap();
    assert_eq!(tokens.len(), 131_933);
    tokens
}

/// Perplexity over the first windows of the validation set, or all.
fn perplexity(options: LoadOptions, windows: Option<usize>) -> f64 {
    let (cpu, model, tokenizer) = load(options);
    let tokens = validation(&model, &tokenizer);
    let tokens = &tokens[..windows.map_or(tokens.len(), |w| w * 512)];
    let mut last = 0;
    let found = eval::perplexity(&model, &cpu, tokens, 512, &mut |progress| {
        last = progress.done;
        ControlFlow::Continue(())
    });
    let found = found.unwrap();
    assert_eq!(found.windows, windows.unwrap_or(257));
    assert_eq!(last, found.windows);
    assert_eq!((found.tokens, found.targets), (found.windows * 512, found.windows * 511));
    found.perplexity
}

#[test]
fn sizes_are_those_of_the_files() {
    let (_, model, tokenizer) = load(LoadOptions::default());
    assert_eq!(model.parameters(), 11_015_040);
    // Norms are widened to f32; everything else keeps its two bytes, and the tied head is held once.
    let norms = 13 * 384;
    assert_eq!(model.weight_bytes(), 22_030_080 + 2 * norms);
    assert_eq!(model.kv_bytes_per_token(), 2 * 6 * 2 * 64 * 4);
    for (kv, of_vector) in KvType::ALL.into_iter().zip([256, 128, 128, 68]) {
        let (_, model, _) = load(LoadOptions { kv: Some(kv), ..LoadOptions::default() });
        assert_eq!((model.kv_type(), model.kv_bytes_per_token()), (kv, 2 * 6 * 2 * of_vector));
    }
    assert_eq!(tokenizer.vocab_size(), 4096);
    let (_, small, _) = load(quantized("w4a8-g128"));
    let of_blocks = 11_015_040 - 4096 * 384 - norms;
    // Half a byte a weight, and a scale of two bytes for each 128.
    assert_eq!(small.weight_bytes(), of_blocks / 2 + of_blocks / 128 * 2 + 4096 * 384 * 2 + norms * 4);
}

#[test]
fn greedy_continuations_equal_the_reference() {
    let (cpu, model, tokenizer) = load(LoadOptions::default());
    let text = std::fs::read_to_string(crate::stdlib().join("reference.json")).unwrap();
    let reference: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let cases = reference["greedy"].as_array().unwrap();
    assert_eq!(cases.len(), 5);
    for case in cases {
        let prompt = tokenizer.encode_prompt(case["prompt"].as_str().unwrap(), model.config().bos).unwrap();
        assert_eq!(prompt, ids(&case["prompt_ids"]));
        let want = ids(&case["new_ids"]);
        let mut session = Session::new(&model, &cpu, prompt.len() + want.len()).unwrap();
        let logits = session.prefill(&prompt).unwrap();
        for top in case["last_logits_top5"].as_array().unwrap() {
            let (token, logit) = (top[0].as_u64().unwrap() as usize, top[1].as_f64().unwrap());
            assert!((f64::from(logits[token]) - logit).abs() < 2e-3, "{token}: {} for {logit}", logits[token]);
        }
        session.clear().unwrap();
        let mut shown = String::new();
        let request = Request {
            prompt: &prompt,
            max_tokens: want.len(),
            sampling: Sampling::default(),
            end_tokens: &[],
            stop: &[],
            cancel: None,
        };
        let got = session.generate(&tokenizer, &request, &mut |text| {
            shown.push_str(text);
            ControlFlow::Continue(())
        });
        let got = got.unwrap();
        assert_eq!(got.tokens, want, "{}", case["prompt"]);
        assert_eq!(got.finish, Finish::Length);
        assert_eq!(got.decoded, want.len() - 1);
        assert_eq!(shown, tokenizer.decode(&want).unwrap());
    }
}

#[test]
#[ignore = "a minute; run with: cargo test -p halfbyte-llm --test it -- --ignored perplexity_of_all_windows"]
fn perplexity_of_all_windows_equals_the_reference() {
    let found = perplexity(LoadOptions::default(), None);
    assert!((found - 5.2916).abs() < 0.002, "{found}");
}

/// What keys and values in fewer bytes cost, over all windows and over a few.
const OF_KV: [(KvType, f64, f64); 3] =
    [(KvType::F16, 1e-4, 5e-4), (KvType::Bf16, 2e-3, 4e-3), (KvType::Int8, 2e-3, 4e-3)];

#[test]
#[ignore = "minutes; run with: cargo test --release -p halfbyte-llm --test it -- --ignored keys_and_values"]
fn keys_and_values_in_fewer_bytes_cost_little_over_all_windows() {
    let exact = perplexity(LoadOptions::default(), None);
    for (kv, at_most, _) in OF_KV {
        let found = perplexity(LoadOptions { kv: Some(kv), ..LoadOptions::default() }, None);
        println!("{kv}: {found:.4}, in f32 {exact:.4}, {:+.3} %", (found / exact - 1.0) * 100.0);
        assert!((found / exact - 1.0).abs() <= at_most, "{kv}: {found}, in f32 {exact}");
    }
}

#[test]
fn keys_and_values_in_fewer_bytes_cost_little_over_a_few_windows() {
    let exact = perplexity(LoadOptions::default(), Some(3));
    for (kv, _, at_most) in OF_KV {
        let found = perplexity(LoadOptions { kv: Some(kv), ..LoadOptions::default() }, Some(3));
        assert!(found != exact && (found / exact - 1.0).abs() <= at_most, "{kv}: {found}, in f32 {exact}");
    }
}

/// The table of the model's README; its scales were not rounded.
const RTN: [(&str, f64); 7] = [
    ("w8a16-g128-sf32", 5.2921),
    ("w4a16-g128-sf32", 5.5327),
    ("w4a16-g128-asym-sf32", 5.4451),
    ("w4a16-g64-asym-sf32", 5.4270),
    ("w4a16-g32-asym-sf32", 5.3932),
    ("w4a16-sf32", 5.6252),
    ("w3a16-g128-asym-sf32", 6.2610),
];

#[test]
#[ignore = "minutes; run with: cargo test --release -p halfbyte-llm --test it -- --ignored"]
fn perplexities_after_rounding_to_nearest_equal_the_table() {
    for (format, want) in RTN {
        let found = perplexity(quantized(format), None);
        println!("{format}: {found:.4}, by the table {want:.4}");
        assert!((found - want).abs() < 0.01, "{format}: {found}, by the table {want}");
    }
}

#[test]
#[ignore = "minutes; run with: cargo test --release -p halfbyte-llm --test it -- --ignored"]
fn quantized_activations_cost_at_most_half_a_percent_over_all_windows() {
    for format in ["w4a16-g128", "w4a16-g128-asym", "w4a16-g32-asym", "w8a16-g128", "w3a16-g128-asym"] {
        let exact = perplexity(quantized(format), None);
        for suffix in ["", "-xasym"] {
            let format = format.replace("a16", "a8") + suffix;
            let found = perplexity(quantized(&format), None);
            println!("{format}: {found:.4}, exact {exact:.4}, {:+.3} %", (found / exact - 1.0) * 100.0);
            assert!(found <= exact * 1.005, "{format}: {found}, exact {exact}");
        }
    }
}

/// The order of quality looks like on a few windows, and what activations in 8 bits cost.
#[test]
fn a_few_windows_show_the_cost_of_quantizing() {
    let windows = Some(6);
    let dense = perplexity(LoadOptions::default(), windows);
    let eight = perplexity(quantized("w8a16-g128"), windows);
    let exact = perplexity(quantized("w4a16-g128"), windows);
    let fine = perplexity(quantized("w4a16-g32-asym"), windows);
    assert!((eight / dense - 1.0).abs() < 0.001, "{dense} {eight}");
    assert!(dense < fine && fine < exact && exact < 1.08 * dense, "{dense} {fine} {exact}");
    for (format, exact) in [("w4a8-g128", exact), ("w4a8-g32-asym", fine), ("w8a8-g128-xasym", eight)] {
        let found = perplexity(quantized(format), windows);
        assert!(found <= exact * 1.005 && found >= exact * 0.995, "{format}: {found}, exact {exact}");
    }
}

/// Logits after every 50th of 600 tokens (more than one batch), batched and one by one.
fn batched_and_single(options: LoadOptions) -> [Vec<f32>; 2] {
    let (cpu, model, tokenizer) = load(options);
    let tokens = validation(&model, &tokenizer);
    let tokens = &tokens[..600];
    let mut batched = Session::new(&model, &cpu, 601).unwrap();
    let mut single = Session::new(&model, &cpu, 601).unwrap();
    let [mut of_batched, mut of_single] = [Vec::new(), Vec::new()];
    let take = &mut |logits: &[f32]| {
        of_batched.extend_from_slice(logits);
        Ok(())
    };
    batched.logits_of_all(tokens, take).unwrap();
    assert_eq!(of_batched.len(), 600 * 4096);
    let mut of_batched: Vec<f32> = of_batched.chunks_exact(4096).skip(49).step_by(50).flatten().copied().collect();
    for (position, &token) in tokens.iter().enumerate() {
        let logits = single.decode(token).unwrap();
        if position % 50 == 49 {
            of_single.extend_from_slice(logits);
        }
    }
    batched.clear().unwrap();
    of_batched.extend_from_slice(batched.prefill(tokens).unwrap());
    of_single.extend_from_within(11 * 4096..);
    of_batched.extend_from_slice(batched.decode(5).unwrap());
    of_single.extend_from_slice(single.decode(5).unwrap());
    assert_eq!((batched.len(), single.len()), (601, 601));
    [of_batched, of_single]
}

#[test]
fn a_batched_prefill_equals_token_by_token() {
    let mean = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f32>() / a.len() as f32;
    let worst = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let [a, b] = batched_and_single(LoadOptions::default());
    assert!(worst(&a, &b) < 1e-4, "dense: {}", worst(&a, &b));
    let [exact, b] = batched_and_single(quantized("w4a16-g128"));
    assert!(worst(&exact, &b) < 1e-4, "exact activations: {}", worst(&exact, &b));
    // A last bit that differs turns a rounding of activations the other way, and soon all roundings are others: the two
    // lie as far from each other as either from exact activations, and no farther.
    let [a, b] = batched_and_single(quantized("w4a8-g128"));
    let (apart, noise) = (mean(&a, &b), mean(&a, &exact));
    assert!(apart < 1.5 * noise && noise < 0.1, "apart {apart}, from exact activations {noise}");
}

#[test]
fn prompts_that_cannot_run_are_refused() {
    let (cpu, model, _) = load(quantized("w4a8-g128"));
    assert!(matches!(Session::new(&model, &cpu, 1025), Err(Error::ContextFull { limit: 1024, got: 1025 })));
    let mut session = Session::new(&model, &cpu, 8).unwrap();
    assert!(matches!(session.prefill(&[]), Err(Error::EmptyPrompt)));
    assert!(matches!(session.prefill(&[4096]), Err(Error::UnknownToken { id: 4096, vocab: 4096 })));
    assert!(matches!(session.prefill(&[1; 9]), Err(Error::ContextFull { limit: 8, got: 9 })));
    assert_eq!(session.len(), 0, "refused before anything was read");
    session.prefill(&[1; 8]).unwrap();
    assert!(matches!(session.decode(1), Err(Error::ContextFull { limit: 8, got: 9 })));
    let mut greedy = Sampler::new(Sampling::default()).unwrap();
    session.next(&mut greedy).unwrap();
    session.clear().unwrap();
    assert!(session.is_empty());
    assert!(matches!(session.next(&mut greedy), Err(Error::EmptyPrompt)));
    session.decode(1).unwrap();
    let first = session.next(&mut greedy).unwrap();
    // What is refused changes nothing; what is forgotten has no next.
    assert!(matches!(session.prefill(&[4096]), Err(Error::UnknownToken { .. })));
    assert_eq!(session.next(&mut greedy).unwrap(), first);
    assert!(session.logits_of_all(&[2, 3], &mut |_| Err(Error::Cancelled)).is_err());
    assert_eq!(session.len(), 1);
    assert!(matches!(session.next(&mut greedy), Err(Error::EmptyPrompt)));
}

#[test]
fn perplexity_refuses_what_it_cannot_score() {
    let (cpu, model, _) = load(quantized("w4a8-g128"));
    let run =
        |tokens: &[u32], window| eval::perplexity(&model, &cpu, tokens, window, &mut |_| ControlFlow::Continue(()));
    assert!(matches!(run(&[1; 100], 1), Err(Error::Invalid { .. })));
    assert!(matches!(run(&[1; 100], 101), Err(Error::Input { .. })));
    assert!(matches!(run(&[1; 4000], 1025), Err(Error::ContextFull { .. })));
    assert!(matches!(run(&[5000; 100], 10), Err(Error::UnknownToken { id: 5000, .. })));
    let cancelled = eval::perplexity(&model, &cpu, &[1; 100], 10, &mut |p| {
        if p.done == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(cancelled, Err(Error::Cancelled)));
}

#[test]
fn sampling_stopping_and_cancelling() {
    let (cpu, model, tokenizer) = load(LoadOptions::default());
    let prompt = tokenizer.encode_prompt("def read(self, ", model.config().bos).unwrap();
    let run = |sampling: Sampling, stop: &[String], end: &[u32], limit: Option<usize>| {
        let mut session = Session::new(&model, &cpu, prompt.len() + 100).unwrap();
        let (mut shown, mut pieces) = (String::new(), 0);
        let request = Request { prompt: &prompt, max_tokens: 60, sampling, end_tokens: end, stop, cancel: None };
        let got = session.generate(&tokenizer, &request, &mut |text| {
            shown.push_str(text);
            pieces += 1;
            if Some(pieces) == limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        (got.unwrap(), shown)
    };
    let warm = Sampling { temperature: 0.8, top_k: 50, top_p: 0.95, seed: 11, ..Sampling::default() };
    let (a, text) = run(warm, &[], &[], None);
    assert_eq!(a.tokens, run(warm, &[], &[], None).0.tokens);
    assert_ne!(a.tokens, run(Sampling { seed: 12, ..warm }, &[], &[], None).0.tokens);
    assert_eq!(text, tokenizer.decode(&a.tokens).unwrap());

    let stop = text[text.len() / 2..].chars().take(5).collect::<String>();
    let (got, shown) = run(warm, std::slice::from_ref(&stop), &[], None);
    assert_eq!(got.finish, Finish::Stop);
    assert_eq!(shown, text[..text.find(&stop).unwrap()]);

    let end = a.tokens[20];
    let (got, _) = run(warm, &[], &[end], None);
    assert_eq!(got.finish, Finish::End);
    assert_eq!(got.tokens, a.tokens[..a.tokens.iter().position(|&t| t == end).unwrap()]);

    let (got, shown) = run(warm, &[], &[], Some(3));
    assert_eq!(got.finish, Finish::Cancelled);
    assert!(text.starts_with(&shown));

    let flag = std::sync::atomic::AtomicBool::new(true);
    let mut session = Session::new(&model, &cpu, 100).unwrap();
    let mut request =
        Request { prompt: &prompt, max_tokens: 60, sampling: warm, end_tokens: &[], stop: &[], cancel: Some(&flag) };
    let got = session.generate(&tokenizer, &request, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((got.finish, session.len()), (Finish::Cancelled, 0));
    request.cancel = None;
    request.max_tokens = 1000;
    let got = session.generate(&tokenizer, &request, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((got.finish, session.len()), (Finish::Context, 100));
    request.max_tokens = 0;
    session.clear().unwrap();
    let got = session.generate(&tokenizer, &request, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!((got.finish, got.tokens.len()), (Finish::Length, 0));
}
