//! Every architecture that is calibrated: what norms take up changes no output, and methods come near the dense model.

use super::case::{Case, FORMAT, by_gptq};
use halfbyte::cpu::Cpu;
use halfbyte::quantize::{Rtn, SymmetricScale};
use halfbyte::{WeightFormat, Zero};
use halfbyte_checkpoint::{Job, Quantization, Target, write_model};
use halfbyte_llm::calibrate::{ByAwq, ByGptq, Finished, Layers, Method, Needs, Outcome, RoundToNearest};
use halfbyte_llm::{LoadOptions, Model, Session};
use std::path::Path;
use std::sync::Mutex;

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

/// Counts the rows of inputs by the first layer of a group.
struct Rows(Mutex<Vec<(String, u64)>>);

impl Method for Rows {
    fn settings(&self) -> String {
        "rows".to_owned()
    }

    fn quantize(&self, layers: &Layers<'_>, format: WeightFormat) -> halfbyte::Result<Vec<Outcome>> {
        let rows = layers.inputs.hessian.rows();
        self.0.lock().unwrap().push((layers.group.layers[0].0.clone(), rows));
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
    // It compares what runs in the block, as it is quantised, with what is dense.
    let corrected = ByGptq { correct: Some(0.1), ..by_gptq() };
    let methods: [(&dyn Method, &str); 4] =
        [(&Factors, "factors"), (&gptq, "gptq"), (&corrected, "gptq corrected"), (&awq, "awq")];
    for name in ["bloom", "gemma2", "gemma3", "gpt-neox", "gpt-oss", "mixtral", "phi3", "qwen2", "qwen3-moe"] {
        for (method, what) in methods {
            let case = Case::new(name);
            let dense = logits(&crate::architecture(name));
            let format = WeightFormat { bits: 8, zero: Zero::Symmetric, ..FORMAT };
            let finished = case.run(method, |job| job.format = format).unwrap();
            let error = error(&case, &finished, &dense);
            println!("{name} {what}: {error:.4}");
            // Factors that nobody asked for make groups worse; what was not taken up would be far off.
            assert!(error <= 0.1, "{name} {what}: {error}");
            // Both norms of a block take up factors, and what belongs to them.
            let changed = case.source.checkpoint().tensor_names().filter(|name| finished.changed(name).is_some());
            assert_eq!(changed.count() > 0, !what.starts_with("gptq"), "{name} {what}");
            finished.remove().unwrap();
        }
    }
}

/// Inputs of experts are those of the rows that chose them: of all experts together as many as were routed. An expert that no token
/// chose is rounded to nearest.
#[test]
fn experts_are_quantised_by_the_rows_that_chose_them() {
    let rows = Rows(Mutex::default());
    let case = Case::new("qwen3-moe");
    let tokens = &case.tokens[..super::case::WINDOW];
    let finished = case.run(&rows, |job| job.tokens = tokens).unwrap();
    let seen = std::mem::take(&mut *rows.0.lock().unwrap());
    for layer in 0..2 {
        let of = |part: &str| -> Vec<u64> {
            let here = |name: &str| name.starts_with(&format!("model.layers.{layer}.")) && name.contains(part);
            seen.iter().filter(|(name, _)| here(name)).map(|(_, rows)| *rows).collect()
        };
        let (up, down) = (of("gate_proj"), of("down_proj"));
        assert_eq!((up.len(), down.len()), (8, 8));
        // Rows of one expert are counted by what the quantised model routes, which may move once others are codes.
        for counts in [up, down] {
            assert_eq!(counts.iter().sum::<u64>(), 2 * tokens.len() as u64, "{counts:?}");
        }
    }
    finished.remove().unwrap();
    // Two tokens choose at most four of eight experts.
    let (gptq, case) = (by_gptq(), Case::new("qwen3-moe"));
    let few = case.run(&gptq, |job| (job.tokens, job.window) = (&case.tokens[..2], 2)).unwrap();
    let reports = few.report();
    let unseen = reports.iter().filter(|report| report.dead_columns == report.shape[1]).collect::<Vec<_>>();
    assert!(unseen.len() >= 2 * 4 * 3, "{}", unseen.len());
    for report in unseen {
        assert!(report.output_error == 0.0 && (0.0..0.2).contains(&report.weight_error), "{report:?}");
    }
    few.remove().unwrap();
}
