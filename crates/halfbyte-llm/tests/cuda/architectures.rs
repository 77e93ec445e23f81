//! Every architecture on a GPU, against what transformers computed, and quantised against the CPU.

use super::{all_logits, architecture, gpu, on, options, worst};
use halfbyte::Float;
use halfbyte::cpu::Cpu;
use halfbyte_checkpoint::Checkpoint;
use halfbyte_llm::{Config, Device, LoadOptions, Model, RandomWeights, Session};
use std::path::Path;

/// Of every architecture: in f32 what the CPU is held to, in f16 2e-2 of the logits' standard deviation.
#[test]
fn logits_and_greedy_tokens_of_every_architecture_equal_those_of_transformers() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    let folders = std::fs::read_dir(architecture("llama").parent().unwrap()).unwrap();
    let mut names: Vec<String> = folders.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.len() >= 14, "{names:?}");
    names.push("../gpt-oss-mxfp4".to_owned());
    for name in names {
        let expected = Checkpoint::open(architecture(&name).join("expected.safetensors")).unwrap();
        let (ids, want) = (expected.ints("input_ids").unwrap(), expected.floats("logits").unwrap().to_f32());
        let mean = want.iter().map(|&v| f64::from(v)).sum::<f64>() / want.len() as f64;
        let deviation = (want.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / want.len() as f64).sqrt();
        for (activations, bound) in [(Float::F32, 1e-4), (Float::F16, 2e-2)] {
            let model = Model::load(&architecture(&name), &options(on(&gpu, activations), None)).unwrap();
            let mut got = Vec::new();
            for row in ids.chunks_exact(40) {
                got.extend(all_logits(&model, &cpu, &row.iter().map(|&id| id as u32).collect::<Vec<_>>()));
            }
            let error = f64::from(worst(&got, &want)) / deviation;
            println!("{name} {activations}: largest difference {error:.2e} of the logits' standard deviation");
            assert!(error <= bound, "{name} {activations}: {error}");
            // Token by token, as a text goes on.
            let prompt: Vec<u32> = ids[..12].iter().map(|&id| id as u32).collect();
            let new: Vec<u32> = expected.ints("greedy_new_ids").unwrap().iter().map(|&id| id as u32).collect();
            let mut session = Session::new(&model, &cpu, 36).unwrap();
            // Told to write 24 tokens, transformers chooses none that ends the text.
            let ends = model.config().eos.clone();
            let choose = |logits: &[f32]| {
                let others = (0..logits.len()).rev().filter(|&id| !ends.contains(&(id as u32)));
                others.max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32
            };
            let mut token = choose(session.prefill(&prompt).unwrap());
            for &want in &new {
                assert_eq!(token, want, "{name} {activations}");
                if session.len() < 35 {
                    token = choose(session.decode(token).unwrap());
                }
            }
        }
    }
}

/// Experts, gates, norms and attention of architectures with quantised layers, as the CPU computes them.
#[test]
fn quantized_architectures_give_the_logits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    let tokens: Vec<u32> = (0..30).map(|i| (i * 37 + 5) % 320).collect();
    for name in ["bloom", "gemma2", "gpt-neox", "gpt-oss", "mixtral", "phi3", "qwen3-moe"] {
        for format in ["w4a16-g32", "w8a16-g32-asym"] {
            let model = Model::load(&architecture(name), &options(Device::Cpu, Some(format))).unwrap();
            let want = all_logits(&model, &cpu, &tokens);
            let largest = want.iter().fold(0.0f32, |a, b| a.max(b.abs()));
            let model = Model::load(&architecture(name), &options(on(&gpu, Float::F32), Some(format))).unwrap();
            let error = worst(&all_logits(&model, &cpu, &tokens), &want);
            assert!(error < 1e-4 * largest, "{name} {format}: {error} of {largest}");
        }
    }
}

/// Few rows are multiplied by the experts that the device chose, many by those that the host knows of: the same logits.
#[test]
fn experts_of_one_row_are_those_of_many() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % 320).collect();
    for name in ["mixtral", "qwen3-moe", "gpt-oss"] {
        for (format, activations) in
            [("w4a16-g32", Float::F16), ("w8a16-g32-asym", Float::F16), ("w3a16-g32", Float::F32)]
        {
            let model = Model::load(&architecture(name), &options(on(&gpu, activations), Some(format))).unwrap();
            let many = all_logits(&model, &cpu, &tokens);
            let largest = many.iter().fold(0.0f32, |a, b| a.max(b.abs()));
            let mut session = Session::new(&model, &cpu, tokens.len()).unwrap();
            for (i, &token) in tokens.iter().enumerate() {
                let error = worst(session.decode(token).unwrap(), &many[i * 320..][..320]);
                assert!(error < 1e-2 * largest, "{name} {format}, position {i}: {error} of {largest}");
            }
        }
    }
}

/// Longrope: the room of a text decides which factors serve, with all layers in one kernel and kernel by kernel.
#[test]
fn positions_of_short_and_of_long_texts_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    let factors = |last: f64| (0..32).map(|i| (1.0 + last * f64::from(i) / 31.0).to_string()).collect::<Vec<_>>();
    let (short, long) = (factors(0.5).join(", "), factors(20.0).join(", "));
    let config = format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "vocab_size": 517, "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": {{"type": "longrope",
            "original_max_position_embeddings": 64, "short_factor": [{short}], "long_factor": [{long}]}}}}"#
    );
    let format: halfbyte::Format = "w4a16-g128".parse().unwrap();
    let model = |device: Device| {
        let weights = RandomWeights { format: Some(format.weight), head: None };
        let config = Config::parse(&config, Path::new("config.json")).unwrap();
        Model::random(config, weights, &LoadOptions { device, ..LoadOptions::default() }).unwrap()
    };
    let (on_cpu, tokens) = (model(Device::Cpu), (0..50).map(|i| (i * 103 + 12) % 517).collect::<Vec<u32>>());
    let logits = |model: &Model, room: usize| {
        let mut session = Session::new(model, &cpu, room).unwrap();
        session.prefill(&tokens[..40]).unwrap();
        tokens[40..].iter().flat_map(|&token| session.decode(token).unwrap().to_vec()).collect::<Vec<f32>>()
    };
    let want = [64, 300].map(|room| logits(&on_cpu, room));
    let largest = want[0].iter().fold(0.0f32, |a, b| a.max(b.abs()));
    assert!(worst(&want[0], &want[1]) > 0.1 * largest, "the factors differ");
    for activations in [Float::F32, Float::F16] {
        let on_gpu = model(on(&gpu, activations));
        for (room, want) in [64, 300].into_iter().zip(&want) {
            let error = worst(&logits(&on_gpu, room), want);
            println!("{activations}, room for {room}: {error} of {largest}");
            assert!(error < if activations == Float::F32 { 1e-3 } else { 2e-2 } * largest, "{activations}: {error}");
        }
    }
}
