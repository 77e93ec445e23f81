//! Models of random weights: in every format, the same each time, with activations of order one.

use halfbyte::cpu::Cpu;
use halfbyte::quantize::Rtn;
use halfbyte::{Format, StoredTensor, WeightFormat};
use halfbyte_llm::profile::Profile;
use halfbyte_llm::schedule::{Handle, Options, Request, Scheduler};
use halfbyte_llm::{Config, Error, KvType, LoadOptions, Model, RandomWeights, Sampler, Sampling, Session};
use std::path::Path;

fn config(layers: usize, tied: bool) -> Config {
    let text = format!(
        r#"{{"architectures": ["Qwen2ForCausalLM"], "vocab_size": 300, "hidden_size": 128, "intermediate_size": 256,
            "num_hidden_layers": {layers}, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": {tied}}}"#
    );
    Config::parse(&text, Path::new("config.json")).unwrap()
}

fn weight(name: &str) -> WeightFormat {
    name.parse::<Format>().unwrap().weight
}

fn logits(model: &Model, cpu: &Cpu) -> Vec<f32> {
    let tokens: Vec<u32> = (0..40).map(|i| (i * 89 + 5) % 300).collect();
    let (mut session, mut out) = (Session::new(model, cpu, tokens.len()).unwrap(), Vec::new());
    let take = &mut |logits: &[f32]| {
        out.extend_from_slice(logits);
        Ok(())
    };
    session.logits_of_all(&tokens, take).unwrap();
    out
}

#[test]
fn random_models_compute_finite_logits_the_same_each_time() {
    let cpu = Cpu::all_threads().unwrap();
    let formats =
        ["w4a16-g128", "w4a16-g32-asym", "w4a8-g64", "w8a8", "w3a16-g128-asym", "w2a16-g32-float", "w4a8-g64-asym-si8"];
    let mut seen: Vec<Vec<f32>> = Vec::new();
    for (at, name) in [None].into_iter().chain(formats.map(Some)).enumerate() {
        let head = [None, Some(weight("w8a16-g128")), Some(weight("w4a16-g128"))][at % 3];
        let weights = RandomWeights { format: name.map(weight), head };
        let act = name.map_or(halfbyte::Act::A16, |name| name.parse::<Format>().unwrap().act);
        let options = LoadOptions { act, ..LoadOptions::default() };
        // As deep as models are.
        let make = || Model::random(config(32, at % 2 == 0), weights, &options).unwrap();
        let (model, again) = (make(), make());
        let found = logits(&model, &cpu);
        assert!(found.iter().all(|logit| logit.is_finite()), "{name:?}");
        let size = (found.iter().map(|v| v * v).sum::<f32>() / found.len() as f32).sqrt();
        assert!((0.2..5.0).contains(&size), "{name:?}: logits of deviation {size}");
        assert_eq!(found, logits(&again, &cpu), "{name:?}");
        assert!(!seen.contains(&found), "{name:?}: as another format");
        seen.push(found);
        let least = weights.bytes(&model.config().spec);
        let bytes = model.weight_bytes() as u64;
        assert!(least <= bytes && bytes <= least + least / 2, "{name:?}: {bytes} bytes, at least {least} expected");
        assert!(model.bytes_of_step(1) <= model.weight_bytes());
    }
}

/// Attention is to many positions, so that what is rounded moves all tokens alike: keys and values in f16 move no logit far.
#[test]
fn no_token_hangs_on_a_rounding() {
    let cpu = Cpu::all_threads().unwrap();
    for format in ["w4a16-g128", "w4a16-g32", "w3a16-g32", "w2a16-g64", "w4a16-g32-asym", "w8a16"] {
        let weights = RandomWeights { format: Some(weight(format)), head: None };
        let [exact, rounded] = [KvType::F32, KvType::F16].map(|kv| {
            let options = LoadOptions { kv: Some(kv), ..LoadOptions::default() };
            logits(&Model::random(config(4, false), weights, &options).unwrap(), &cpu)
        });
        let size = (exact.iter().map(|v| v * v).sum::<f32>() / exact.len() as f32).sqrt();
        let worst = exact.iter().zip(&rounded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst > 0.0 && worst < 5e-3 * size, "{format}: {worst} of {size}");
    }
}

#[test]
fn random_models_count_parameters_and_what_a_step_reads() {
    let (blocks, embedding) = (128 * (128 + 64 + 64) + 128 * 128 + 3 * 128 * 256, 300 * 128);
    let norms_and_biases = 2 * 128 + (128 + 64 + 64);
    for (tied, head, heads) in [(true, None, 0), (false, None, 1), (true, Some(weight("w8a16-g128")), 1)] {
        let weights = RandomWeights { format: Some(weight("w4a16-g128")), head };
        let model = Model::random(config(3, tied), weights, &LoadOptions::default()).unwrap();
        let expected = 3 * (blocks + norms_and_biases) + 128 + embedding + heads * embedding;
        assert_eq!(model.parameters(), expected as u64);
        let idle = if heads == 0 { 0 } else { 299 * 128 * 2 };
        assert_eq!(model.weight_bytes() - model.bytes_of_step(1), idle);
    }
}

#[test]
fn random_models_refuse_formats_that_do_not_exist_and_to_be_quantized() {
    let odd = WeightFormat { bits: 5, ..weight("w4a16-g128") };
    for weights in [RandomWeights { format: Some(odd), head: None }, RandomWeights { format: None, head: Some(odd) }] {
        assert!(Model::random(config(1, true), weights, &LoadOptions::default()).is_err());
    }
    let quantize = Some((weight("w4a16-g128"), Rtn::default()));
    let options = LoadOptions { quantize, ..LoadOptions::default() };
    let error = Model::random(config(1, true), RandomWeights::default(), &options).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
}

/// A text that forgets from a position on goes on as one that never read what it forgot.
#[test]
fn what_is_forgotten_leaves_no_trace() {
    let cpu = Cpu::all_threads().unwrap();
    let model = Model::random(config(2, true), RandomWeights::default(), &LoadOptions::default()).unwrap();
    let mut session = Session::new(&model, &cpu, 32).unwrap();
    session.prefill(&[1, 2, 3, 4, 5]).unwrap();
    let want = session.decode(6).unwrap().to_vec();
    session.prefill(&[7, 8, 9]).unwrap();
    session.forget(5).unwrap();
    assert_eq!(session.len(), 5);
    assert_eq!(session.decode(6).unwrap(), want);
    session.forget(100).unwrap();
    assert_eq!(session.len(), 6);
}

#[test]
fn a_profile_has_every_step_of_every_layer_and_leaves_the_text_as_reading_does() {
    let cpu = Cpu::all_threads().unwrap();
    let layers = 3;
    for (format, head, tied) in [("w4a16-g128", Some("w8a16-g128"), true), ("w8a8", None, false)] {
        let weights = RandomWeights { format: Some(weight(format)), head: head.map(weight) };
        let options = LoadOptions { act: format.parse::<Format>().unwrap().act, ..LoadOptions::default() };
        let model = Model::random(config(layers, tied), weights, &options).unwrap();
        let (of_token, vocab, hidden) = (model.kv_bytes_per_token() as f64, 300, 128);
        let mut greedy = Sampler::new(Sampling::default()).unwrap();
        let tokens: Vec<u32> = (0..40).map(|i| (i * 89 + 5) % 300).collect();
        let [mut session, mut other] = [(); 2].map(|()| Session::new(&model, &cpu, 64).unwrap());
        other.read_unless(&tokens, None).unwrap();
        let next = other.next(&mut greedy).unwrap();
        let prompt = session.profile(&tokens).unwrap();
        assert_eq!((session.len(), session.next(&mut greedy).unwrap()), (40, next), "{format}");
        let token = session.profile(&[next]).unwrap();
        assert_eq!(session.len(), 41);
        other.decode(next).unwrap();
        assert_eq!(session.decode(7).unwrap(), other.decode(7).unwrap(), "{format}");

        let of_layer =
            ["attention norm", "q k v", "rope, append", "attention", "o", "mlp norm", "gate, up", "activation", "down"];
        for (profile, rows) in [(&prompt, 40), (&token, 1)] {
            let names: Vec<_> = profile.steps.iter().map(|step| (step.layer, step.name)).collect();
            let mut want = vec![(None, "embedding")];
            want.extend((0..layers).flat_map(|layer| of_layer.map(|name| (Some(layer), name))));
            want.extend(["final norm", "head", "choice"].map(|name| (None, name)));
            assert_eq!(names, want);
            assert!(profile.steps.iter().all(|step| !step.kernel.is_empty() && step.bytes > 0.0));
            let sum: f64 = profile.steps.iter().map(|step| step.seconds).sum();
            assert!(sum > 0.0 && sum <= profile.seconds, "{sum} of {}", profile.seconds);
            // Behind the last layer's keys and values one row goes on.
            for step in &profile.steps {
                let last =
                    step.layer == Some(layers - 1) && !["attention norm", "q k v", "rope, append"].contains(&step.name);
                let alone = last || ["final norm", "head", "choice"].contains(&step.name);
                assert_eq!(step.rows, if alone { 1 } else { rows }, "{step:?}");
            }
        }
        let bytes: f64 = token.steps.iter().map(|step| step.bytes).sum();
        let least = model.bytes_of_step(1) as f64 + 41.0 * of_token;
        // Besides weights, keys and values there are rows.
        let of_rows = (layers * 4 * (20 * hidden + 6 * 256) + 4 * (8 * hidden + 3 * vocab)) as f64;
        assert!(least <= bytes && bytes <= least + of_rows, "{format}: {bytes}, {least} to {}", least + of_rows);
        let flop: f64 = prompt.steps.iter().map(|step| step.flop).sum();
        let products = |rows: usize| 2 * rows * (128 * (128 + 64 + 64) + 128 * 128 + 3 * 128 * 256);
        let attention = |rows: std::ops::Range<usize>| rows.map(|row| 4 * 128 * (row + 1)).sum::<usize>();
        let of_last = 2 * 40 * 128 * 256 + 2 * (128 * 128 + 3 * 128 * 256) + attention(39..40);
        let of_head = 2 * vocab * hidden;
        assert_eq!(flop, ((layers - 1) * (products(40) + attention(0..40)) + of_last + of_head) as f64);
        assert!(matches!(session.profile(&[]), Err(Error::EmptyPrompt)));
        assert!(matches!(session.profile(&[300]), Err(Error::UnknownToken { .. })));
        assert!(matches!(session.profile(&[1; 64]), Err(Error::ContextFull { .. })));
    }
}

/// What ranks draw for themselves is what they would cut from the whole.
#[test]
fn parts_of_random_weights_are_those_of_the_whole() {
    let whole = [96, 512];
    for name in ["w4a16-g128", "w4a16-g32-asym", "w3a16-g64", "w8a8", "w2a16-g32-float", "w4a8-g64-asym-si8"] {
        let (format, seed) = (weight(name), 7);
        let all = StoredTensor::random(format, whole, seed).unwrap();
        for (rows, columns) in [(0..96, 0..512), (5..17, 0..512), (0..96, 128..384), (40..96, 256..512), (3..3, 0..512)]
        {
            let part = StoredTensor::random_part(format, whole, seed, [rows.clone(), columns.clone()]).unwrap();
            let want = all.part(std::slice::from_ref(&rows), std::slice::from_ref(&columns)).unwrap();
            assert_eq!(part.to_qtensor().unwrap(), want, "{name} {rows:?} {columns:?}");
        }
        for [rows, columns] in [[0..97, 0..512], [0..96, 3..512], [0..96, 0..513]] {
            assert!(StoredTensor::random_part(format, whole, seed, [rows, columns]).is_err(), "{name}");
        }
    }
}

/// What texts of these lengths become, and a profile of the step behind their prompts, if it is asked for.
fn written(model: &Model, cpu: &Cpu, lengths: &[usize], profiled: bool) -> (Vec<Vec<u32>>, Option<Profile>) {
    let (mut scheduler, queue) = Scheduler::new(model, cpu, Options { positions: 512, ..Options::default() }).unwrap();
    let submit = |(i, &len): (usize, &usize)| {
        let prompt = (0..len).map(|at| ((at + i) * 89 + 5) as u32 % 300).collect();
        queue.submit(Request { prompt, max_tokens: 9, sampling: Sampling::default(), end_tokens: Vec::new() }).unwrap()
    };
    let mut handles: Vec<Handle> = lengths.iter().enumerate().map(submit).collect();
    drop(queue);
    assert!(scheduler.step().unwrap());
    let profile = profiled.then(|| scheduler.profile().unwrap().unwrap());
    while scheduler.step().unwrap() {}
    assert!(scheduler.profile().unwrap().is_none(), "nothing is left to do");
    (handles.iter_mut().map(|handle| handle.rest().unwrap()).collect(), profile)
}

#[test]
fn a_profile_of_many_texts_has_the_steps_of_all_and_leaves_them_as_a_step_does() {
    let cpu = Cpu::all_threads().unwrap();
    let (layers, lengths) = (2, [5, 40, 12]);
    let weights = RandomWeights { format: Some(weight("w4a16-g128")), head: None };
    let model = Model::random(config(layers, true), weights, &LoadOptions::default()).unwrap();
    let (got, profile) = written(&model, &cpu, &lengths, true);
    let (want, _) = written(&model, &cpu, &lengths, false);
    assert_eq!(got, want);
    let profile = profile.unwrap();
    assert!(profile.steps.iter().all(|step| step.rows == 3 && !step.kernel.is_empty() && step.bytes > 0.0));
    assert_eq!(profile.steps.len(), 1 + 9 * layers + 3);
    let of = |name: &str| profile.steps.iter().filter(|step| step.name == name).collect::<Vec<_>>();
    // Each text's token sees what that text has read, and itself.
    let seen: usize = lengths.iter().map(|len| len + 1).sum();
    for attention in of("attention") {
        assert_eq!(attention.flop, (4 * 128 * seen) as f64);
        let of_rows = 3 * 128 * 2 * size_of::<f32>();
        assert_eq!(attention.bytes, (of_rows + seen * model.kv_bytes_per_token() / layers) as f64);
    }
    assert_eq!(of("head")[0].flop, (3 * 2 * 300 * 128) as f64);
    assert_eq!(of("down")[0].flop, (3 * 2 * 256 * 128) as f64);
    let sum: f64 = profile.steps.iter().map(|step| step.seconds).sum();
    assert!(sum > 0.0 && sum <= profile.seconds, "{sum} of {}", profile.seconds);
}
