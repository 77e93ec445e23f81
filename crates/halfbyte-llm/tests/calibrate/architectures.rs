//! Every architecture that is calibrated: what norms take up changes no output, and methods come near the dense model.

use super::case::{Case, FORMAT, by_gptq};
use halfbyte::cpu::Cpu;
use halfbyte::quantize::{Rtn, SymmetricScale};
use halfbyte::{WeightFormat, Zero};
use halfbyte_checkpoint::{Job, Quantization, Target, write_model};
use halfbyte_llm::calibrate::{ByAwq, Finished, Layers, Method, Needs, Outcome, RoundToNearest};
use halfbyte_llm::{LoadOptions, Model, Session};
use std::path::Path;

/// Twice and half of every channel wherever something takes it up.
struct Factors;

impl Method for Factors {
    fn settings(&self) -> String {
        "factors".to_owned()
    }

    fn needs(&self) -> Needs {
        Needs { scales: true, ..Needs::default() }
    }

    fn scales(&self, block: &[Layers<'_>], _: WeightFormat) -> halfbyte::Result<Vec<Option<Vec<f32>>>> {
        let factors = |layers: &Layers<'_>| [2.0, 0.5, 1.0].iter().copied().cycle().take(layers.k()).collect();
        Ok(block.iter().map(|layers| layers.group.fold.as_ref().map(|_| factors(layers))).collect())
    }

    fn quantize(&self, layers: &Layers<'_>, format: WeightFormat) -> halfbyte::Result<Vec<Outcome>> {
        RoundToNearest(Rtn::default()).quantize(layers, format)
    }
}

fn logits(path: &Path) -> Vec<f32> {
    let (cpu, model) = (Cpu::new(1).unwrap(), Model::load(path, &LoadOptions::default()).unwrap());
    let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % 320).collect();
    Session::new(&model, &cpu, 40).unwrap().prefill(&tokens).unwrap().to_vec()
}

/// The largest difference from the dense model's logits, of these.
fn error(case: &Case, finished: &Finished, dense: &[f32]) -> f32 {
    let target = case.here.path().join("written");
    let quantization = Quantization {
        target: Target::Native,
        format: &mut |layer| finished.format(layer.name),
        quantize: &mut |layer, _, _| Ok(finished.tensor(layer.name).unwrap().unwrap()),
        dense: &mut |name| finished.changed(name).map(<[f32]>::to_vec),
        untied: None,
    };
    write_model(Job { overwrite: true, ..Job::new(&case.source, &target) }, quantization).unwrap();
    let most = dense.iter().fold(0.0f32, |most, l| most.max(l.abs()));
    let got = logits(&target);
    got.iter().zip(dense).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / most
}

#[test]
fn methods_come_near_the_dense_model_of_every_architecture() {
    let awq = ByAwq { symmetric: SymmetricScale::default() };
    let gptq = by_gptq();
    for name in ["bloom", "gemma2", "gemma3", "phi3", "qwen2", "qwen3"] {
        for (method, what) in [(&Factors as &dyn Method, "factors"), (&gptq, "gptq"), (&awq, "awq")] {
            let case = Case::new(name);
            let dense = logits(&super::case::folder(name));
            let format = WeightFormat { bits: 8, zero: Zero::Symmetric, ..FORMAT };
            let finished = case.run(method, |job| job.format = format).unwrap();
            let error = error(&case, &finished, &dense);
            println!("{name} {what}: {error:.4}");
            assert!(error <= 0.05, "{name} {what}: {error}");
            // Both norms of a block take up factors, and what belongs to them.
            let changed = case.source.checkpoint().tensor_names().filter(|name| finished.changed(name).is_some());
            assert_eq!(changed.count() > 0, what != "gptq", "{name} {what}");
            finished.remove().unwrap();
        }
    }
}

#[test]
fn what_is_not_calibrated_is_named() {
    for (name, why) in [
        ("mixtral", "a mixture of experts"),
        ("qwen3-moe", "a mixture of experts"),
        ("gpt-oss", "a mixture of experts"),
        ("gpt-neox", "an MLP beside attention"),
    ] {
        let error = Case::new(name).run(&by_gptq(), |_| {}).unwrap_err().to_string();
        assert!(error.ends_with(why), "{name}: {error}");
    }
}
