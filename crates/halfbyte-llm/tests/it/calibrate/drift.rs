//! How far the dense model is from the quantised one.

use super::case::*;
use halfbyte::WeightFormat;
use halfbyte::quantize::{CrossMoment, Drift, Hessian, Rtn};
use halfbyte_llm::LoadOptions;
use halfbyte_llm::calibrate::{Block, Layers, Method, Needs, Outcome, RoundToNearest};
use halfbyte_llm::load::{Loader, embed};
use std::ops::ControlFlow;
use std::sync::Mutex;

/// First layer's name, drift, Hessian, weights.
type SeenDrift = (String, Moment, Hessian, Vec<f32>);

/// Whether it is of outputs, and the sums.
type Moment = (bool, CrossMoment);

/// Keeps the drift that it is given, and makes a layer's weights zero if they belong to these groups.
struct Drifting {
    zero: &'static [&'static str],
    seen: Mutex<Vec<SeenDrift>>,
}

impl Method for Drifting {
    fn settings(&self) -> String {
        format!("drifting {:?}", self.zero)
    }

    fn needs(&self) -> Needs {
        Needs { drift: true, ..Needs::default() }
    }

    fn quantize(&self, layers: &Layers<'_>, format: WeightFormat) -> halfbyte::Result<Vec<Outcome>> {
        let (name, inputs) = (layers.group.layers[0].0.clone(), layers.inputs);
        let drift = match inputs.drift().unwrap() {
            Drift::Inputs(moment) => (false, moment.clone()),
            Drift::Outputs(moment) => (true, moment.clone()),
        };
        let seen = (name.clone(), drift, inputs.hessian.clone(), layers.weights.to_vec());
        self.seen.lock().unwrap().push(seen);
        if self.zero.iter().any(|part| name.ends_with(part)) {
            return Nothing.quantize(layers, format);
        }
        RoundToNearest(Rtn::default()).quantize(layers, format)
    }
}

#[test]
fn drift_is_how_far_the_dense_model_is_from_the_quantized_one() {
    let case = Case::new("llama");
    let run = |zero| {
        let method = Drifting { zero, seen: Mutex::new(Vec::new()) };
        // At 8 bits what is not zero is as good as dense.
        let finished = case.run(&method, |job| job.format = WeightFormat { bits: 8, ..FORMAT }).unwrap();
        finished.remove().unwrap();
        method.seen.into_inner().unwrap()
    };
    let largest =
        |(_, moment): &Moment| (0..moment.m()).flat_map(|i| moment.row(i)).map(|v| v.abs()).fold(0.0, f64::max);
    // Nothing is quantised before the first group, and little is lost at 8 bits.
    let fine = run(&[]);
    assert_eq!(fine[0].0, "model.layers.0.self_attn.q_proj");
    assert_eq!(largest(&fine[0].1), 0.0);
    for (name, drift, hessian, _) in &fine[1..] {
        let inputs = (0..hessian.k()).map(|j| hessian.get(j, j)).fold(0.0, f64::max);
        assert!(largest(drift) > 0.0 && largest(drift) < 0.1 * inputs, "{name}");
    }
    // What the step before failed to add to the stream is missing from the stream at the next outputs: without it, the
    // drift of the outputs of down is far smaller.
    let coarse = run(&["o_proj"]);
    let of_down = |seen: &[SeenDrift]| largest(&seen[3].1);
    assert!(of_down(&coarse) > 20.0 * of_down(&fine), "{} {}", of_down(&coarse), of_down(&fine));

    // By the formula, where all of it can be computed here: gate and up are zero, so that down sees nothing and its
    // moment is zero whatever the outputs.
    let blind = run(&["gate_proj"]);
    assert_eq!(blind[3].0, "model.layers.0.mlp.down_proj");
    assert_eq!((largest(&blind[3].1), blind[3].2.get(7, 7)), (0.0, 0.0));
}

#[test]
fn drift_by_the_formula() {
    // One window, the last group of the first block: inputs and streams of both models by running blocks here.
    let mut case = Case::new("llama");
    case.tokens.truncate(WINDOW);
    let method = Drifting { zero: &["v_proj", "q_proj"], seen: Mutex::new(Vec::new()) };
    case.run(&method, |_| {}).unwrap().remove().unwrap();
    let seen = method.seen.into_inner().unwrap();
    let mut loader = Loader::new(&case.source, LoadOptions::default()).unwrap();
    let mut block = Block::load(&case.config.spec, &mut loader, 0).unwrap();
    let mut embedded = vec![0.0; WINDOW * 128];
    embed(&case.config.spec, &case.source, &case.tokens, &mut embedded).unwrap();

    // q, k and v are zero: attention gives nothing, so o sees x = 0 and the moment with x is zero; gate and up then see
    // the norm of the embedding itself.
    let (_, (outputs, moment), hessian, _) = &seen[1];
    assert_eq!((*outputs, hessian.get(0, 0), moment.row(3)[5]), (true, 0.0, 0.0));
    let mut dense = embedded.clone();
    let go = &mut |_: usize, _: &[f32]| Ok(ControlFlow::Continue(()));
    let _ = block.forward(&case.cpu, 0, &mut dense, go).unwrap();
    let (stream_of_dense, stream_of_quantized) = (dense.clone(), embedded.clone());
    let mut taps = [Vec::new(), Vec::new()];
    for (stream, taps) in [dense, embedded].iter_mut().zip(&mut taps) {
        let _ = block
            .forward(&case.cpu, 1, stream, &mut |_, x| {
                taps.push(x.to_vec());
                Ok(ControlFlow::Continue(()))
            })
            .unwrap();
    }
    let [of_dense, of_quantized] = taps;
    let (_, (outputs, moment), _, _) = &seen[2];
    assert_eq!((*outputs, moment.m(), moment.k()), (false, 128, 128));
    for (i, j) in [(0, 0), (5, 90), (127, 3)] {
        let product = |row: usize| {
            let (e, x) = (of_dense[0][row * 128 + i] - of_quantized[0][row * 128 + i], of_quantized[0][row * 128 + j]);
            f64::from(e) * f64::from(x)
        };
        let want = (0..WINDOW).map(product).sum::<f64>();
        assert!((moment.row(i)[j] - want).abs() < 1e-4 * want.abs().max(1e-2), "{want}");
    }
    // Down, with gate and up at 4 bits: the inputs of the quantised model come back from its Hessian only, so its place
    // is taken by the dense gate and up, which is close.
    let (_, (outputs, moment), _, weights) = &seen[3];
    assert_eq!((*outputs, moment.m(), moment.k()), (true, 128, 256));
    let mut worst = [0.0f64; 2];
    for i in 0..128 {
        for j in (0..256).step_by(17) {
            let product = |row: usize| {
                let x = |of: &Vec<f32>, l: usize| f64::from(of[row * 256 + l]);
                let output = |l: usize| (x(&of_dense[1], l) - x(&of_quantized[1], l)) * f64::from(weights[i * 256 + l]);
                let at = row * 128 + i;
                let stream = f64::from(stream_of_dense[at]) - f64::from(stream_of_quantized[at]);
                ((0..256).map(output).sum::<f64>() + stream) * x(&of_quantized[1], j)
            };
            let want = (0..WINDOW).map(product).sum::<f64>();
            worst[0] = worst[0].max((moment.row(i)[j] - want).abs());
            worst[1] = worst[1].max(want.abs());
        }
    }
    assert!(worst[0] < 0.2 * worst[1], "{worst:?}");
}
