//! Divergence of models from each other, against sums in f64 over their raw logits.

use halfbyte::Format;
use halfbyte::cpu::Cpu;
use halfbyte::quantize::Rtn;
use halfbyte_llm::eval::{self, KlDivergence, Scored};
use halfbyte_llm::{Error, LoadOptions, Model, Result};
use std::ops::ControlFlow;

const VOCAB: usize = 320;

fn load(name: &str, quantize: Option<&str>) -> Model {
    let folder = crate::architecture(name);
    let options = quantize.map_or_else(LoadOptions::default, |format| {
        let format: Format = format.parse().unwrap();
        LoadOptions { act: format.act, quantize: Some((format.weight, Rtn::default())), ..LoadOptions::default() }
    });
    Model::load(&folder, &options).unwrap()
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * i * 31 + i * 7) % VOCAB as u32).collect()
}

fn run(model: &Model, reference: &Model, tokens: &[u32], window: usize) -> Result<KlDivergence> {
    let cpu = Cpu::all_threads().unwrap();
    eval::kl_divergence(model, reference, &cpu, tokens, window, &mut |_| ControlFlow::Continue(()))
}

fn perplexity(model: &Model, tokens: &[u32], window: usize) -> f64 {
    let cpu = Cpu::all_threads().unwrap();
    eval::perplexity(model, &cpu, tokens, window, &mut |_| ControlFlow::Continue(())).unwrap().perplexity
}

/// `[rows, window, vocab]`.
fn logits(model: &Model, tokens: &[u32], window: usize) -> Vec<f64> {
    let ids: Vec<i32> = tokens.iter().map(|&id| id as i32).collect();
    let (cpu, mut all) = (Cpu::all_threads().unwrap(), Vec::new());
    let ids = eval::Ids { ids: &ids, shape: [ids.len() / window, window] };
    let write = &mut |logits: &[f32]| {
        all.extend(logits.iter().map(|&x| f64::from(x)));
        Ok(())
    };
    eval::logits(model, &cpu, &ids, write, &mut |_| ControlFlow::Continue(())).unwrap();
    all
}

fn log_softmax(row: &[f64]) -> Vec<f64> {
    let max = row.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
    row.iter().map(|x| x - max - sum.ln()).collect()
}

fn argmax(row: &[f64]) -> usize {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best })
}

#[track_caller]
fn assert_near(got: f64, expected: f64) {
    assert!((got - expected).abs() <= 1e-11 * expected.abs().max(1.0), "{got}, expected {expected}");
}

/// As llama.cpp's llama-perplexity: windows that begin with the token that begins a text, their second half scored.
#[test]
fn perplexity_of_second_halves() {
    let (model, cpu) = (load("llama", None), Cpu::all_threads().unwrap());
    let run = |tokens: &[u32], window, bos| {
        let of = (window, Scored::SecondHalf { bos });
        eval::perplexity_of(&model, &cpu, tokens, of, &mut |_| ControlFlow::Continue(()))
    };
    for (window, bos) in [(48, Some(1)), (33, Some(1)), (3, None)] {
        let tokens = tokens(200);
        let mut windows: Vec<Vec<u32>> = tokens.chunks_exact(window).map(<[u32]>::to_vec).collect();
        windows.iter_mut().for_each(|read| read[0] = bos.unwrap_or(read[0]));
        let all = logits(&model, &windows.concat(), window);
        let (mut sum, mut targets) = (0.0, 0);
        for (read, logits) in windows.iter().zip(all.chunks_exact(window * VOCAB)) {
            for at in window / 2..window - 1 {
                sum -= log_softmax(&logits[at * VOCAB..][..VOCAB])[read[at + 1] as usize];
                targets += 1;
            }
        }
        let found = run(&tokens, window, bos).unwrap();
        assert_eq!((found.targets, found.windows), (targets, windows.len()));
        assert_near(found.perplexity, (sum / targets as f64).exp());
    }
    assert!(matches!(run(&tokens(9), 2, None), Err(Error::Invalid { .. })));
}

#[test]
fn a_model_does_not_diverge_from_itself() {
    for format in [None, Some("w4a8-g32")] {
        let model = load("llama", format);
        let found = run(&model, &model, &tokens(300), 48).unwrap();
        let KlDivergence { mean, standard_error, median, p90, p99, p999, max, top1_agreement, .. } = found;
        assert_eq!([mean, median, p90, p99, p999, max], [0.0; 6]);
        assert_eq!((standard_error, top1_agreement), (Some(0.0), 1.0));
        assert_eq!((found.windows, found.tokens, found.positions), (6, 288, 282));
        assert_eq!(found.perplexity, perplexity(&model, &tokens(300), 48));
        assert_eq!((found.reference_perplexity, found.perplexity_ratio()), (found.perplexity, 1.0));
    }
}

#[test]
fn it_is_what_sums_over_raw_logits_say() {
    let (model, reference) = (load("llama", Some("w3a16-g32")), load("llama", None));
    // Windows of one position, of a part of the logits computed at a time, and of the whole context.
    for (window, count) in [(2, 8), (40, 219), (256, 600)] {
        let tokens = tokens(count);
        let found = run(&model, &reference, &tokens, window).unwrap();
        let whole = &tokens[..count / window * window];
        let (ours, theirs) = (logits(&model, whole, window), logits(&reference, whole, window));
        let (mut divergences, mut agreements) = (Vec::new(), 0);
        for (i, (q, p)) in ours.chunks(VOCAB).zip(theirs.chunks(VOCAB)).enumerate() {
            if i % window == window - 1 {
                continue;
            }
            let (ln_p, ln_q) = (log_softmax(p), log_softmax(q));
            divergences.push(ln_p.iter().zip(&ln_q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>());
            agreements += usize::from(argmax(p) == argmax(q));
        }
        let count = divergences.len() as f64;
        assert_eq!((found.windows, found.positions), (whole.len() / window, divergences.len()));
        let mean = divergences.iter().sum::<f64>() / count;
        let variance = divergences.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / (count - 1.0);
        assert!(mean > 1e-3, "{mean}");
        assert_near(found.mean, mean);
        assert_near(found.standard_error.unwrap(), (variance / count).sqrt());
        divergences.sort_by(f64::total_cmp);
        let quantile = |fraction: f64| {
            let at = fraction * (count - 1.0);
            let (low, high) = (divergences[at.floor() as usize], divergences[at.ceil() as usize]);
            low * (1.0 - at.fract()) + high * at.fract()
        };
        assert_near(found.median, quantile(0.5));
        assert_near(found.p90, quantile(0.9));
        assert_near(found.p99, quantile(0.99));
        assert_near(found.p999, quantile(0.999));
        assert_near(found.max, *divergences.last().unwrap());
        assert_eq!(found.top1_agreement, agreements as f64 / count);
        assert_eq!(found.perplexity, perplexity(&model, &tokens, window));
        assert_eq!(found.reference_perplexity, perplexity(&reference, &tokens, window));
        assert_eq!(found.perplexity_ratio(), found.perplexity / found.reference_perplexity);
    }
}

#[test]
fn it_has_a_direction_and_the_same_bits_on_any_number_of_threads() {
    let (model, reference, tokens) = (load("llama", Some("w2a16-g32")), load("llama", None), tokens(240));
    let there = run(&model, &reference, &tokens, 60).unwrap();
    let back = run(&reference, &model, &tokens, 60).unwrap();
    assert_ne!(there.mean, back.mean);
    assert_eq!((there.perplexity, there.top1_agreement), (back.reference_perplexity, back.top1_agreement));
    let one = Cpu::new(1).unwrap();
    let mut seen = Vec::new();
    let alone = eval::kl_divergence(&model, &reference, &one, &tokens, 60, &mut |progress| {
        seen.push((progress.done, progress.total));
        ControlFlow::Continue(())
    });
    assert_eq!(KlDivergence { seconds: there.seconds, ..alone.unwrap() }, there);
    assert_eq!(seen, [(1, 4), (2, 4), (3, 4), (4, 4)]);
}

#[test]
fn what_cannot_be_compared_is_refused() {
    let (model, other) = (load("llama", None), load("llama3-rope", None));
    // Two models of one vocabulary may differ in everything else.
    assert!(run(&model, &other, &tokens(80), 40).unwrap().mean > 0.1);
    assert!(matches!(run(&model, &other, &tokens(80), 1), Err(Error::Invalid { .. })));
    assert!(matches!(run(&model, &other, &tokens(80), 81), Err(Error::Input { .. })));
    assert!(matches!(run(&model, &other, &tokens(4000), 2000), Err(Error::ContextFull { .. })));
    assert!(matches!(run(&model, &other, &[320; 80], 40), Err(Error::UnknownToken { id: 320, .. })));
    let cpu = Cpu::new(1).unwrap();
    let cancelled = eval::kl_divergence(&model, &other, &cpu, &tokens(80), 40, &mut |_| ControlFlow::Break(()));
    assert!(matches!(cancelled, Err(Error::Cancelled)));
    let larger = crate::stdlib();
    let larger = Model::load(&larger, &LoadOptions::default()).unwrap();
    for (model, reference) in [(&model, &larger), (&larger, &model)] {
        let error = run(model, reference, &tokens(80), 40).unwrap_err().to_string();
        assert!(error.contains("320") && error.contains("4096") && error.contains("vocabulary"), "{error}");
    }
}
