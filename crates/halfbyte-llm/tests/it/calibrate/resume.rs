//! Stopping and going on, on any number of threads.

use super::case::*;
use halfbyte::cpu::Cpu;
use halfbyte::quantize::{Gptq, SymmetricScale};
use halfbyte_checkpoint::Weights;
use halfbyte_llm::Error;
use halfbyte_llm::calibrate::{self, ByAwq, ByGptq, Job, Method, work_folder};
use std::ops::ControlFlow;

#[test]
fn a_run_that_was_stopped_anywhere_goes_on_to_the_same_bits() {
    for (case, method) in [
        (Case::new("llama"), &by_gptq() as &dyn Method),
        (Case::new("llama"), &refined()),
        (Case::with_biases("llama-tied-mha"), &Scaling::new(&[0.5, 1.0, 3.0, 0.7])),
    ] {
        let mut calls = 0;
        let job = case.job(method);
        let finished = calibrate::quantize(&job, &mut |_| {
            calls += 1;
            ControlFlow::Continue(())
        });
        let want = content(&case, finished.unwrap());
        assert_eq!(want.0.len(), 7 * case.config.spec.layers.len());
        // Stopped once, at every few of its steps, the first and the last among them.
        for stop in (0..calls).step_by(37).chain([calls - 1]) {
            let stopped = case.run_until(method, stop, |_| {});
            assert!(matches!(stopped, Err(Error::Cancelled)), "{stop} of {calls}");
            let got = content(&case, case.run(method, |_| {}).unwrap());
            assert_eq!(got, want, "stopped at {stop} of {calls}");
        }
        // Stopped again and again.
        let mut left = calls / 2;
        let got = loop {
            match case.run_until(method, left, |_| {}) {
                Err(Error::Cancelled) => left += calls / 7,
                finished => break content(&case, finished.unwrap()),
            }
        };
        assert_eq!(got, want);
        // Finished, but never written: nothing is computed again.
        drop(case.run(method, |_| {}).unwrap());
        assert_eq!(content(&case, case.run_until(method, 0, |_| {}).unwrap()), want);
        // What a killed process left half-written does not matter.
        assert!(case.run_until(method, calls - 1, |_| {}).is_err());
        let half = work_folder(&case.target).unwrap().join("block-00001.tmp");
        std::fs::create_dir_all(&half).unwrap();
        std::fs::write(half.join("model.safetensors"), "half").unwrap();
        assert_eq!(content(&case, case.run(method, |_| {}).unwrap()), want);
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for method in
        [&refined() as &dyn Method, &ByAwq { symmetric: SymmetricScale::Full }, &Scaling::new(&[2.0, 0.3, 1.0])]
    {
        for true_sequential in [true, false] {
            let [one, three] = [1, 3].map(|threads| {
                let mut case = Case::new("llama-tied-mha");
                case.cpu = Cpu::new(threads).unwrap();
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    let finished = case.run(method, |job| job.true_sequential = true_sequential).unwrap();
                    content(&case, finished)
                })
            });
            assert_eq!(one, three);
        }
    }
}

#[test]
fn work_that_was_begun_with_something_else_is_not_gone_on_with() {
    let mut case = Case::new("llama");
    let method = by_gptq();
    let begin = |case: &Case| assert!(matches!(case.run_until(&method, 50, |_| {}), Err(Error::Cancelled)));
    begin(&case);
    let refused = |case: &Case, method: &dyn Method, key: &str, change: &dyn Fn(&mut Job<'_>)| {
        let error = case.run(method, change).unwrap_err();
        assert!(matches!(error, Error::Unfinished { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&format!(": {key}: ")) && !text.contains(';'), "{key} alone: {text}");
    };
    refused(&case, &ByGptq { gptq: Gptq::default(), ..method }, "method", &|_| {});
    refused(&case, &method, "format", &|job| job.format.bits = 3);
    refused(&case, &method, "true_sequential", &|job| job.true_sequential = false);
    case.tokens[5] += 1;
    refused(&case, &method, "tokens_fnv1a", &|_| {});
    case.tokens[5] -= 1;
    case.cpu =
        Cpu::with_caps(1, halfbyte::cpu::isa::Caps { isa: halfbyte::cpu::isa::Isa::Plain, bf16_dot: false }).unwrap();
    if case.cpu.caps() != Cpu::new(1).unwrap().caps() {
        refused(&case, &method, "instructions", &|_| {});
    }
    case.cpu = Cpu::new(2).unwrap();
    case.config.spec.norm.eps *= 2.0;
    refused(&case, &method, "config_fnv1a", &|_| {});
    case.config.spec.norm.eps /= 2.0;

    // The weights are written anew.
    let copy = case.here.path().join("copy");
    std::fs::create_dir(&copy).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(crate::architecture("llama").join(file), copy.join(file)).unwrap();
    }
    case.source = Weights::open(&copy).unwrap();
    refused(&case, &method, "files", &|_| {});

    // Unless it may be discarded.
    let want = content(&case, case.run(&method, |job| job.restart = true).unwrap());
    begin(&case);
    assert_eq!(content(&case, case.run(&method, |_| {}).unwrap()), want);
}

#[test]
fn damaged_work_is_refused_and_not_read() {
    let case = Case::new("llama");
    let method = by_gptq();
    drop(case.run(&method, |_| {}).unwrap());
    let work = work_folder(&case.target).unwrap();
    let block = work.join("block-00001");
    let (weights, report, manifest) =
        (block.join("model.safetensors"), block.join("report.json"), work.join("manifest.json"));
    for path in [&weights, &report, &manifest] {
        let whole = std::fs::read(path).unwrap();
        for content in [&whole[..whole.len() / 2], &[][..], b"[]"] {
            std::fs::write(path, content).unwrap();
            let error = case.run(&method, |_| {}).unwrap_err();
            assert!(matches!(error, Error::Unfinished { .. }), "{}: {error}", path.display());
        }
        std::fs::write(path, whole).unwrap();
    }
    // The tensors of another block.
    let whole = std::fs::read(&weights).unwrap();
    std::fs::copy(work.join("block-00000/model.safetensors"), &weights).unwrap();
    let error = case.run(&method, |_| {}).unwrap_err();
    assert!(error.to_string().contains("block 1 is damaged"), "{error}");
    // A bit of a code, which any reader takes for another number.
    let mut flipped = whole.clone();
    let last = flipped.len() - 1;
    flipped[last] ^= 0x10;
    std::fs::write(&weights, flipped).unwrap();
    let error = case.run(&method, |_| {}).unwrap_err();
    assert!(matches!(error, Error::Unfinished { .. }), "{error}");
    assert!(error.to_string().contains("block 1 is damaged"), "{error}");
    // Without it, it is computed again.
    std::fs::remove_dir_all(&block).unwrap();
    drop(case.run(&method, |_| {}).unwrap());
    assert!(std::fs::read(&weights).unwrap() == whole);
    std::fs::rename(&manifest, work.join("other")).unwrap();
    assert!(matches!(case.run(&method, |_| {}), Err(Error::Unfinished { .. })));
    std::fs::rename(work.join("other"), &manifest).unwrap();
    case.run(&method, |_| {}).unwrap().remove().unwrap();
}

#[test]
fn two_processes_do_not_work_in_one_folder() {
    let case = Case::new("llama");
    let method = by_gptq();
    let finished = case.run(&method, |_| {}).unwrap();
    let second = case.run(&method, |_| {});
    assert!(matches!(&second, Err(Error::Locked { path }) if path == finished.folder()), "{second:?}");
    assert!(matches!(case.run(&method, |job| job.restart = true), Err(Error::Locked { .. })));
    drop(finished);
    case.run(&method, |_| {}).unwrap().remove().unwrap();
}

#[test]
fn a_dry_run_announces_at_least_what_is_used() {
    let case = Case::new("llama");
    let method = by_gptq();
    let job = case.job(&method);
    let estimate = calibrate::estimate(&job).unwrap();
    assert_eq!(std::fs::read_dir(case.here.path()).unwrap().count(), 0, "nothing was written");
    assert_eq!(estimate.stream_bytes, (case.tokens.len() * 128 * 4) as u64);
    assert!(estimate.seconds > 0.0 && estimate.peak_memory_bytes > estimate.stream_bytes);
    let finished = calibrate::quantize(&job, &mut |_| ControlFlow::Continue(())).unwrap();
    let mut bytes = 0;
    for block in 0..case.config.spec.layers.len() {
        bytes +=
            std::fs::metadata(finished.folder().join(format!("block-{block:05}/model.safetensors"))).unwrap().len();
    }
    assert!(bytes <= estimate.work_bytes && 2 * bytes > estimate.work_bytes, "{bytes} of {}", estimate.work_bytes);
    finished.remove().unwrap();
}
