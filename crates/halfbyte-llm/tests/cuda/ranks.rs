//! Models that ranks share on a GPU: threads of one process, each with its own stream.
//!
//! Kernels are made ready before, since loading one waits for all that runs on a device.

use super::{architecture, gpu, options, worst};
use halfbyte::Float;
use halfbyte::cpu::Cpu;
use halfbyte_llm::comm::{Alone, Comm, Thread};
use halfbyte_llm::device::Gpu;
use halfbyte_llm::{Device, LoadOptions, Model, Session};
use std::path::Path;
use std::sync::Arc;

/// Logits of all rows of a prompt, then of a continuation, token by token (recorded from the second on).
fn logits(model: &Model, comm: &dyn Comm, tokens: &[u32]) -> Vec<f32> {
    let cpu = Cpu::new(1).unwrap();
    model.prepare(&|_, _| ()).unwrap();
    comm.wait().unwrap();
    let mut session = Session::new(model, &cpu, tokens.len()).unwrap();
    let (prompt, rest) = tokens.split_at(tokens.len() / 2);
    let mut all = Vec::new();
    let mut take = |logits: &[f32]| {
        all.extend_from_slice(logits);
        Ok(())
    };
    session.logits_of_all(prompt, &mut take).unwrap();
    for &token in rest {
        all.extend_from_slice(session.decode(token).unwrap());
    }
    comm.wait().unwrap();
    all
}

fn of_ranks(size: usize, path: &Path, options: &LoadOptions, tokens: &[u32]) -> Vec<Vec<f32>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = Thread::group(size)
            .into_iter()
            .map(|comm| {
                scope.spawn(move || {
                    let options = LoadOptions { comm: Arc::new(comm.clone()), ..options.clone() };
                    logits(&Model::load(path, &options).unwrap(), &comm, tokens)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn deviation(values: &[f32]) -> f32 {
    let mean = values.iter().sum::<f32>() / values.len() as f32;
    (values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt()
}

/// Norms over what ranks add, embeddings that are the head, experts, MLPs beside attention, heads that ranks share: as one rank has them,
/// and the same bits on all.
#[test]
fn ranks_have_the_logits_of_one() {
    let Some(gpu) = gpu() else { return };
    let tokens: Vec<u32> = (0..24).map(|i| (i * 37 + 5) % 320).collect();
    for name in ["bloom", "gemma2", "gpt-neox", "llama", "llama-tied-mha", "mixtral", "qwen3"] {
        for (format, activations, bound) in [
            (None, Float::F32, 1e-4),
            (None, Float::F16, 2e-2),
            (Some("w4a16-g32-asym"), Float::F16, 2e-2),
            (Some("w8a8-g32"), Float::F16, 0.2),
        ] {
            let gpu = Gpu { activations, persistent: false, ..gpu.clone() };
            let (path, options) = (architecture(name), options(Device::Cuda(gpu), format));
            let want = logits(&Model::load(&path, &options).unwrap(), &Alone, &tokens);
            for size in [2, 3] {
                let all = of_ranks(size, &path, &options, &tokens);
                let off = worst(&all[0], &want) / deviation(&want);
                println!("{name} {format:?} {activations}, {size} ranks: off by {off:.2e} of the standard deviation");
                assert!(off <= bound, "{name} {format:?} {activations}, {size} ranks: {off}");
                assert!(all.iter().all(|other| other == &all[0]), "{name} {format:?}: ranks differ");
            }
        }
    }
}
