//! Every architecture on a GPU, against what transformers computed, and quantised against the CPU.

use super::{all_logits, architecture, gpu, on, options, worst};
use halfbyte::Float;
use halfbyte::cpu::Cpu;
use halfbyte_checkpoint::Checkpoint;
use halfbyte_llm::{Device, Model, Session};

/// Of every architecture: in f32 what the CPU is held to, in f16 2e-2 of the logits' standard deviation.
#[test]
fn logits_and_greedy_tokens_of_every_architecture_equal_those_of_transformers() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    let folders = std::fs::read_dir(architecture("llama").parent().unwrap()).unwrap();
    let names: Vec<String> = folders.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.len() >= 14, "{names:?}");
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
