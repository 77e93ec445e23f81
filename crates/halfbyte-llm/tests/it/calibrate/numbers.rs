//! What methods are given, and what is reported of their answers.

use super::case::*;
use halfbyte::cpu::nn;
use halfbyte::format::reference;
use halfbyte::quantize::{Gptq, Hessian, SymmetricScale, rtn};
use halfbyte::{Float, Group, WeightFormat, Zero};
use halfbyte_checkpoint::LinearWeight;
use halfbyte_llm::arch::spec::Fold;
use halfbyte_llm::calibrate::{Block, ByAwq, ByGptq, LayerReport, Layers, Method, Needs, Outcome, groups, work_folder};
use halfbyte_llm::comm::Alone;
use halfbyte_llm::device::cpu::Vocabulary;
use halfbyte_llm::load::{Loader, embed};
use halfbyte_llm::{Error, LoadOptions, Model, Session};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Mutex;

#[test]
fn blocks_one_after_the_other_are_the_model() {
    for name in ["llama", "llama-tied-mha", "llama3-rope", "gpt-neox"] {
        let case = Case::new(name);
        let (config, tokens, cpu) = (&case.config, &case.tokens[..40], &case.cpu);
        let model = Model::from_weights(config.clone(), &case.source, &LoadOptions::default()).unwrap();
        let mut session = Session::new(&model, cpu, 40).unwrap();
        let mut want = Vec::new();
        let take = &mut |logits: &[f32]| {
            want.extend_from_slice(logits);
            Ok(())
        };
        session.logits_of_all(tokens, take).unwrap();

        let mut loader = Loader::new(&case.source, LoadOptions::default()).unwrap();
        let mut stream = vec![0.0; 40 * config.spec.hidden];
        embed(&config.spec, &case.source, tokens, &mut stream).unwrap();
        for i in 0..config.spec.layers.len() {
            let groups = groups(&config.spec, i).unwrap();
            let mut block = Block::load(&config.spec, &mut loader, i).unwrap();
            let mut seen = Vec::new();
            for step in 0..=groups[3].step {
                let before = stream.clone();
                for last in (0..4).filter(|&group| groups[group].step == step) {
                    let stop = &mut |group: usize, _: &[f32]| {
                        Ok(if group == last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
                    };
                    let stopped = block.forward(cpu, step, &mut stream, stop).unwrap();
                    assert!(stopped.is_break() && stream == before, "a step that is stopped changes nothing");
                }
                let tap = &mut |group: usize, x: &[f32]| {
                    assert_eq!((x.len(), groups[group].step), (40 * groups[group].k(), step));
                    seen.push(group);
                    Ok(ControlFlow::Continue(()))
                };
                assert!(block.forward(cpu, step, &mut stream, tap).unwrap().is_continue());
            }
            assert_eq!(seen, [0, 1, 2, 3]);
        }
        let (of_model, mut normed) = (&config.spec.norm, vec![0.0; stream.len()]);
        let norm = loader.vector(&of_model.weight(), config.spec.hidden).unwrap();
        match of_model.bias() {
            None => nn::rms_norm(cpu, &stream, &norm, of_model.eps, &mut normed).unwrap(),
            Some(bias) => {
                let bias = loader.vector(&bias, config.spec.hidden).unwrap();
                nn::layer_norm(cpu, &stream, &norm, Some(&bias), of_model.eps, &mut normed).unwrap();
            }
        }
        let head = Vocabulary::load(&mut loader, &config.spec).unwrap();
        let mut got = vec![0.0; want.len()];
        head.logits(cpu, &Alone, &normed, 40, &mut got).unwrap();
        assert_eq!(got, want, "{name}");
    }
}

/// Weights, Hessian, answers.
type Recorded = (Vec<f32>, Hessian, Vec<Outcome>);

/// Keeps what it is given and what it answers.
struct Recording {
    inner: ByGptq,
    seen: Mutex<Vec<Recorded>>,
}

impl Method for Recording {
    fn settings(&self) -> String {
        self.inner.settings()
    }

    fn quantize(&self, layers: &Layers<'_>, format: WeightFormat) -> halfbyte::Result<Vec<Outcome>> {
        let outcomes = self.inner.quantize(layers, format)?;
        let seen = (layers.weights.to_vec(), layers.inputs.hessian.clone(), outcomes.clone());
        self.seen.lock().unwrap().push(seen);
        Ok(outcomes)
    }

    fn operations(&self, n: usize, k: usize) -> f64 {
        self.inner.operations(n, k)
    }

    fn memory_bytes(&self, n: usize, k: usize, format: WeightFormat) -> u64 {
        self.inner.memory_bytes(n, k, format)
    }
}

#[test]
fn the_report_is_the_formula() {
    for (bits, group, zero) in [
        (4, Group::Size(32), Zero::Integer),
        (3, Group::Channel, Zero::Symmetric),
        (2, Group::Size(64), Zero::Float),
        (8, Group::Tensor, Zero::Symmetric),
    ] {
        let case = Case::new("llama");
        let recording = Recording { inner: by_gptq(), seen: Mutex::new(Vec::new()) };
        let format = WeightFormat { bits, group, zero, scale: Float::F16, channel_scale: None };
        let finished = case.run(&recording, |job| job.format = format).unwrap();
        let mut reports = finished.report().iter();
        for (weights, hessian, outcomes) in recording.seen.into_inner().unwrap() {
            let mut weights = weights.as_slice();
            for outcome in outcomes {
                let report: &LayerReport = reports.next().unwrap();
                let q = &outcome.weights;
                let (dense, rest) = weights.split_at(q.n() * q.k());
                weights = rest;
                let values = reference::dequantize(q);
                let difference: Vec<f64> = dense.iter().zip(values).map(|(&w, q)| f64::from(w) - q).collect();
                let dense: Vec<f64> = dense.iter().map(|&w| f64::from(w)).collect();
                let k = q.k();
                let outputs = |m: &[f64]| {
                    let row = |row: &[f64]| {
                        (0..k).map(|i| (0..k).map(|j| row[i] * hessian.get(i, j) * row[j]).sum::<f64>()).sum::<f64>()
                    };
                    m.chunks(k).map(row).sum::<f64>()
                };
                let squares = |m: &[f64]| m.iter().map(|v| v * v).sum::<f64>();
                let close = |got: f64, a: f64, b: f64| assert!((got / (a / b).sqrt() - 1.0).abs() < 1e-9, "{report:?}");
                close(report.output_error, outputs(&difference), outputs(&dense));
                close(report.weight_error, squares(&difference), squares(&dense));
                assert!(report.output_error < report.weight_error, "{report:?}");
                assert_eq!((report.shape, report.dead_columns, report.damping), ([q.n(), k], 0, Some(0.01)));
                let scales = q.scales().len()
                    * (16
                        + match zero {
                            Zero::Symmetric => 0,
                            Zero::Integer => bits as usize,
                            Zero::Float => 16,
                        });
                let index = q.group_index().map_or(0, |index| 32 * index.len());
                let want = f64::from(bits) + (scales + index) as f64 / (q.n() * k) as f64;
                assert!((report.bits_per_weight - want).abs() < 1e-12, "{report:?}, {want}");
            }
        }
        assert!(reports.next().is_none());
        finished.remove().unwrap();
    }
}

#[test]
fn inputs_are_those_of_the_quantized_layers_before() {
    let case = Case::new("llama");
    let dead = |true_sequential| {
        let finished = case.run(&Nothing, |job| job.true_sequential = true_sequential).unwrap();
        let report: Vec<usize> = finished.report().iter().map(|layer| layer.dead_columns).collect();
        assert!(finished.report().iter().all(|layer| layer.weight_error == 1.0));
        finished.remove().unwrap();
        report
    };
    // q, k, v, o, gate, up, down: without values o sees nothing, without gate and up down sees nothing.
    assert_eq!(dead(true), [0, 0, 0, 128, 0, 0, 256].repeat(2));
    assert_eq!(dead(false), [0; 14]);
}

#[test]
fn factors_are_folded_so_that_the_model_stays_the_same() {
    for (case, has_values, biases) in [
        (Case::new("llama-tied-mha"), true, 0),
        (Case::new("llama"), false, 0),
        (Case::with_biases("llama-tied-mha"), true, 2),
    ] {
        let method = Scaling::new(&[0.5, 1.7, 1.0, 3.1, 0.21]);
        let finished = case.run(&method, |job| job.format = WeightFormat { bits: 8, ..FORMAT }).unwrap();
        let seen = method.seen.into_inner().unwrap();
        assert_eq!(seen.len(), 8 * case.config.spec.layers.len());
        for of_block in seen.chunks(8) {
            let (before, after) = of_block.split_at(4);
            for (before, after) in before.iter().zip(after) {
                let foldable = before.group.fold.is_some();
                assert_eq!(foldable, has_values || !before.group.layers[0].0.ends_with("o_proj"));
                // The second time the layers before are rounded to 8 bits; the first time nothing is folded.
                let ratio = after.outputs / before.outputs;
                assert!((ratio - 1.0).abs() < 0.02, "{}: {ratio}", before.group.layers[0].0);
                assert!(after.squares != before.squares || !foldable);
                assert!((8..=10).contains(&before.sample) && before.sample == after.sample);
            }
        }
        let mut changed = 0;
        for info in case.source.checkpoint().tensors() {
            let Some(values) = finished.changed(info.name) else { continue };
            changed += 1;
            let dense = case.source.checkpoint().floats(info.name).unwrap();
            assert!(values.iter().all(|&v| dense.dtype().round(v) == v) && values != dense.to_f32(), "{}", info.name);
        }
        assert_eq!(changed, (2 + biases) * case.config.spec.layers.len());
        finished.remove().unwrap();
    }
}

/// Answers with the wrong factors.
struct Wrong(Vec<Option<Vec<f32>>>);

impl Method for Wrong {
    fn settings(&self) -> String {
        "wrong".to_owned()
    }

    fn needs(&self) -> Needs {
        Needs { scales: true, ..Needs::default() }
    }

    fn scales(&self, _: &[Layers<'_>], _: WeightFormat) -> halfbyte::Result<Vec<Option<Vec<f32>>>> {
        Ok(self.0.clone())
    }

    fn quantize(&self, _: &Layers<'_>, _: WeightFormat) -> halfbyte::Result<Vec<Outcome>> {
        Ok(Vec::new())
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let mut case = Case::new("llama");
    let groups = groups(&case.config.spec, 0).unwrap();
    assert!(matches!(&groups[0].fold, Some(Fold::Norm(norm)) if norm.name == "model.layers.0.input_layernorm"));
    assert_eq!((&groups[1].fold, &groups[3].fold), (&None, &Some(Fold::Linear { group: 2, layer: 1 })));
    let some = |k: usize, value: f32| Some(vec![value; k]);
    for scales in [
        vec![None; 3],
        vec![some(127, 1.0), None, None, None],
        vec![some(128, 0.0), None, None, None],
        vec![None, None, some(128, f32::NAN), None],
        vec![None, some(128, 1.0), None, None],
        // Nothing wrong with these, but no layers come back.
        vec![None; 4],
    ] {
        let refused = case.run(&Wrong(scales), |job| job.restart = true).unwrap_err();
        assert!(matches!(refused, Error::Invalid { .. }), "{refused}");
    }
    let method = by_gptq();
    for (bad, tokens) in [("window", &case.tokens[..WINDOW + 1]), ("none", &[])] {
        let refused = case.run(&method, |job| job.tokens = tokens).unwrap_err();
        assert!(matches!(refused, Error::Invalid { .. }), "{bad}: {refused}");
    }
    let refused = case.run(&method, |job| job.window = 0).unwrap_err();
    assert!(matches!(refused, Error::Invalid { .. }), "{refused}");
    let refused = case.run(&method, |job| (job.tokens, job.window) = (&[1; 257], 257)).unwrap_err();
    assert!(matches!(refused, Error::ContextFull { limit: 256, got: 257 }), "{refused}");
    case.tokens[30] = 320;
    assert!(matches!(case.run(&method, |_| {}), Err(Error::UnknownToken { id: 320, vocab: 320 })));
    case.tokens[30] = 1;
    let bad_damping = ByGptq { gptq: Gptq { damping: -1.0, ..Gptq::default() }, ..by_gptq() };
    let refused = case.run(&bad_damping, |job| job.restart = true).unwrap_err();
    assert!(matches!(&refused, Error::Quantize { name, .. } if name == "model.layers.0.self_attn.q_proj"), "{refused}");
    assert!(matches!(work_folder(Path::new("/")), Err(Error::Invalid { .. })));
}

/// GPTQ, with everything that it can do, and AWQ.
fn methods() -> [Box<dyn Method>; 3] {
    [Box::new(by_gptq()), Box::new(refined()), Box::new(ByAwq { symmetric: SymmetricScale::default() })]
}

#[test]
fn the_layer_whose_weights_are_no_numbers_is_named() {
    // A layer that shares its inputs with another, and comes second: NaN in f16 and bf16.
    let (name, row, column) = ("model.layers.1.mlp.up_proj", 3, 9);
    let case = Case::with_tensor("llama", &format!("{name}.weight"), |bytes| {
        let at = 2 * (row * 128 + column);
        bytes[at..at + 2].fill(0xff);
    });
    for method in methods() {
        let refused = case.run(method.as_ref(), |job| job.restart = true).unwrap_err();
        let Error::Quantize { name: found, source } = &refused else { panic!("{refused}") };
        let place = matches!(source, halfbyte::Error::NotFinite { row: 3, column: 9, .. });
        assert!(found == name && place, "{}: {refused}", method.settings());
    }
}

#[test]
fn layers_whose_inputs_are_all_zero_are_rounded_to_nearest() {
    let (up, down) = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj");
    let case = Case::with_tensor("llama", up, |bytes| bytes.fill(0));
    let dense = case.source.load_linear(down).unwrap().weight;
    let LinearWeight::Dense { floats, shape } = &dense else { panic!("codes") };
    for method in methods() {
        let finished = case.run(method.as_ref(), |_| {}).unwrap();
        let report = finished.report().iter().find(|layer| layer.name == down).unwrap();
        assert_eq!((report.dead_columns, report.damping), (report.shape[1], None), "{}", method.settings());
        let expected = rtn(floats.as_floats(), *shape, FORMAT, method.rounding().unwrap()).unwrap();
        assert!(finished.tensor(down).unwrap().unwrap() == expected, "{}", method.settings());
        finished.remove().unwrap();
    }
}
