//! Tiny models of each variant against the logits and greedy tokens that transformers computed.

use halfbyte::cpu::Cpu;
use halfbyte_checkpoint::Checkpoint;
use halfbyte_llm::{Error, LoadOptions, Model, Session, eval};
use std::ops::ControlFlow;

const MODELS: [&str; 16] = [
    "bloom",
    "gemma2",
    "gemma3",
    "gpt-neox",
    "gpt-oss",
    // Quantised: beside the others, which are quantised by tests.
    "../gpt-oss-mxfp4",
    "llama",
    "llama-tied-mha",
    "llama-yarn",
    "llama3-rope",
    "mistral-window",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3-moe",
];

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
}

#[test]
fn logits_and_greedy_tokens_equal_those_of_transformers() {
    let cpu = Cpu::all_threads().unwrap();
    for name in MODELS {
        let model = Model::load(&crate::architecture(name), &LoadOptions::default()).unwrap();
        let expected = Checkpoint::open(crate::architecture(name).join("expected.safetensors")).unwrap();
        let (ids, want) = (expected.ints("input_ids").unwrap(), expected.floats("logits").unwrap().to_f32());
        let mut got = Vec::new();
        let mut write = |logits: &[f32]| {
            got.extend_from_slice(logits);
            Ok(())
        };
        let ids_of = eval::Ids { ids: &ids, shape: [2, 40] };
        eval::logits(&model, &cpu, &ids_of, &mut write, &mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(got.len(), want.len());
        let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // As many deviations as products in f32 differ in another order of sums: 2e-3 would still be the same model.
        let mean = want.iter().map(|&v| f64::from(v)).sum::<f64>() / want.len() as f64;
        let deviation = (want.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / want.len() as f64).sqrt();
        println!("{name}: largest difference {:.2e} of the logits' standard deviation", f64::from(worst) / deviation);
        assert!(f64::from(worst) <= 5e-5 * deviation, "{name}: {worst} of {deviation}");

        let prompt: Vec<u32> = ids[..12].iter().map(|&id| id as u32).collect();
        let new: Vec<u32> = expected.ints("greedy_new_ids").unwrap().iter().map(|&id| id as u32).collect();
        assert_eq!(new.len(), 24);
        let mut session = Session::new(&model, &cpu, 36).unwrap();
        // Told to write 24 tokens, transformers chooses none that ends the text.
        let ends = model.config().eos.clone();
        let choose = |logits: &[f32]| {
            let mut logits = logits.to_vec();
            ends.iter().for_each(|&end| logits[end as usize] = f32::NEG_INFINITY);
            argmax(&logits)
        };
        let mut token = choose(session.prefill(&prompt).unwrap());
        for &want in &new {
            assert_eq!(token, want, "{name}");
            if session.len() < 35 {
                token = choose(session.decode(token).unwrap());
            }
        }
    }
}

#[test]
fn a_wrong_tensor_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let copy = |from: &str| std::fs::copy(crate::architecture("llama").join(from), dir.path().join(from)).unwrap();
    copy("model.safetensors");
    let config = std::fs::read_to_string(crate::architecture("llama").join("config.json")).unwrap();
    let refused = |from: &str, to: &str| {
        assert!(config.contains(from));
        std::fs::write(dir.path().join("config.json"), config.replace(from, to)).unwrap();
        Model::load(dir.path(), &LoadOptions::default()).unwrap_err().to_string()
    };
    let text = refused("\"intermediate_size\": 256", "\"intermediate_size\": 320");
    assert!(text.contains("model.layers.0.mlp.gate_proj") && text.contains("320 × 128"), "{text}");
    let text = refused("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4000");
    assert!(text.contains("model.layers.2."), "{text}");
    let text = refused("\"attention_bias\": false", "\"attention_bias\": true");
    assert!(text.contains("q_proj.bias"), "{text}");
    let text = refused("\"vocab_size\": 320", "\"vocab_size\": 321");
    assert!(text.contains("model.embed_tokens.weight"), "{text}");
}

#[test]
fn ids_that_cannot_run_are_refused() {
    let cpu = Cpu::new(1).unwrap();
    let model = Model::load(&crate::architecture("llama"), &LoadOptions::default()).unwrap();
    let run = |ids: &[i32], shape| {
        eval::logits(&model, &cpu, &eval::Ids { ids, shape }, &mut |_| Ok(()), &mut |_| ControlFlow::Continue(()))
    };
    assert!(matches!(run(&[1, -1], [1, 2]), Err(Error::Input { .. })));
    assert!(matches!(run(&[1, 320], [1, 2]), Err(Error::UnknownToken { id: 320, .. })));
    assert!(matches!(run(&[1, 2, 3], [1, 2]), Err(Error::Invalid { .. })));
    assert!(matches!(run(&[], [0, 0]), Err(Error::EmptyPrompt)));
    assert!(matches!(run(&[1; 257], [1, 257]), Err(Error::ContextFull { limit: 256, got: 257 })));
}
