//! The output head: its inputs, and that a run which was stopped at it goes on.

use super::case::*;
use halfbyte::quantize::Rtn;
use halfbyte::{WeightFormat, Zero};
use halfbyte_llm::Error;
use halfbyte_llm::calibrate::{self, Head, Layers, Method, Needs, Outcome, RoundToNearest};
use std::ops::ControlFlow;
use std::sync::Mutex;

const EIGHT: WeightFormat = WeightFormat { bits: 8, zero: Zero::Symmetric, ..FORMAT };

/// The head of a tiny model.
fn head(case: &Case, format: WeightFormat) -> Head<'_> {
    let spec = &case.config.spec;
    Head { name: "lm_head", source: spec.head.as_ref().unwrap_or(&spec.embedding), format }
}

/// Rounds, and keeps the second moments of the head's inputs, and what is missing to the dense model.
#[derive(Default)]
struct Looking(Mutex<Vec<(u64, Vec<f64>)>>);

impl Method for Looking {
    fn settings(&self) -> String {
        "looking".to_owned()
    }

    fn needs(&self) -> Needs {
        Needs { drift: true, ..Needs::default() }
    }

    fn quantize(&self, layers: &Layers<'_>, format: WeightFormat) -> halfbyte::Result<Vec<Outcome>> {
        if layers.group.layers[0].0 == "lm_head" {
            let hessian = &layers.inputs.hessian;
            assert!(layers.inputs.drift().is_some());
            let diagonal = (0..layers.k()).map(|j| hessian.get(j, j)).collect();
            self.0.lock().unwrap().push((hessian.rows(), diagonal));
        }
        RoundToNearest(Rtn::default()).quantize(layers, format)
    }
}

#[test]
fn the_head_sees_the_normed_stream() {
    for model in ["llama", "llama-tied-mha"] {
        let (case, method) = (Case::new(model), Looking::default());
        let head = head(&case, EIGHT);
        let finished = case.run(&method, |job| job.head = Some(head)).unwrap();
        let seen = method.0.lock().unwrap();
        let [(rows, diagonal)] = &seen[..] else { panic!("the head is quantised once") };
        assert_eq!(*rows as usize, case.tokens.len());
        // A row without the norm's weight has the length √hidden.
        let hidden = case.config.spec.hidden;
        let weight = case.source.floats(&format!("{}.weight", case.config.spec.norm.name), &[hidden]).unwrap().to_f32();
        let lengths: f64 = diagonal.iter().zip(&weight).map(|(sum, w)| sum / f64::from(*w).powi(2)).sum();
        let want = (case.tokens.len() * hidden) as f64;
        assert!((lengths / want - 1.0).abs() < 1e-2, "{lengths} {want}");
        let q = finished.tensor("lm_head").unwrap().unwrap();
        assert_eq!((q.format(), finished.format("lm_head")), (EIGHT, Some(EIGHT)));
        assert_eq!([q.n(), q.k()], [case.config.spec.vocab, hidden]);
        let report = finished.report().last().unwrap();
        assert!(report.name == "lm_head" && (1e-4..1e-2).contains(&report.output_error), "{report:?}");
        assert!(report.activations.is_some());
        finished.remove().unwrap();
    }
}

#[test]
fn a_run_that_was_stopped_at_the_head_goes_on_to_the_same_bits() {
    let (case, method) = (Case::new("llama"), refined());
    let mut job = case.job(&method);
    job.head = Some(head(&case, FORMAT));
    let (mut calls, mut at_head) = (0, None);
    let finished = calibrate::quantize(&job, &mut |at| {
        calls += 1;
        assert_eq!(at.blocks, case.config.spec.layers.len() + 1);
        if at.layer == "lm_head" {
            at_head = at_head.or(Some(calls - 1));
        }
        ControlFlow::Continue(())
    });
    let want = content(&case, finished.unwrap());
    assert_eq!(want.0.len(), 7 * case.config.spec.layers.len() + 1);
    for stop in [calls / 2, at_head.unwrap(), calls - 1] {
        let stopped = case.run_until(&method, stop, |job| job.head = Some(head(&case, FORMAT)));
        assert!(matches!(stopped, Err(Error::Cancelled)), "{stop} of {calls}");
        let got = content(&case, case.run(&method, |job| job.head = Some(head(&case, FORMAT))).unwrap());
        assert_eq!(got, want, "stopped at {stop} of {calls}");
    }
    // Without the head, or with another format of it, it is another run.
    assert!(case.run_until(&method, calls - 1, |job| job.head = Some(head(&case, FORMAT))).is_err());
    for other in [None, Some(head(&case, EIGHT))] {
        assert!(matches!(case.run(&method, |job| job.head = other), Err(Error::Unfinished { .. })));
    }
}
