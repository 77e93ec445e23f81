//! Many texts at once on a GPU: against each of them alone, and against the CPU.

use super::{gpu, on, options, stdlib};
use halfbyte::Float;
use halfbyte::cpu::Cpu;
use halfbyte_llm::schedule::{Handle, Options, Request, Scheduler};
use halfbyte_llm::{Device, Finish, KvType, LoadOptions, Model, Sampling};

/// Prompts that differ; every fourth begins as the others of its kind. Every third text is greedy, one asks for what has no kernel.
fn request(i: usize, prompt: usize, max_tokens: usize) -> Request {
    let token = |p: usize| match i % 4 {
        0 if p < 150 => (p * 31 % 4000) as u32 + 1,
        _ => ((p * 131 + i * 977 + p * p * 7) % 4000) as u32 + 1,
    };
    let prompt = (0..prompt).map(token).collect();
    let sampling = Sampling {
        temperature: if i.is_multiple_of(3) { 0.0 } else { 0.9 },
        top_k: 40,
        min_p: if i == 7 { 0.1 } else { 0.0 },
        seed: i as u64,
        ..Sampling::default()
    };
    Request { prompt, max_tokens, sampling, end_tokens: Vec::new() }
}

/// What texts come to that are written together; how often one was preempted. All pages have come back.
fn written(model: &Model, requests: &[Request], options: Options) -> (Vec<Vec<u32>>, u64) {
    let cpu = Cpu::all_threads().unwrap();
    let (mut scheduler, queue) = Scheduler::new(model, &cpu, options).unwrap();
    let mut handles: Vec<Handle> = requests.iter().map(|request| queue.submit(request.clone()).unwrap()).collect();
    drop(queue);
    scheduler.run().unwrap();
    let texts = handles.iter_mut().zip(requests).map(|(handle, request)| {
        let tokens = handle.rest().unwrap();
        assert_eq!((tokens.len(), handle.finish()), (request.max_tokens, Some(Finish::Length)));
        tokens
    });
    let texts = texts.collect();
    scheduler.forget_prefixes().unwrap();
    assert_eq!(scheduler.free_pages(), scheduler.pages(), "{scheduler:?}");
    (texts, scheduler.preempted())
}

/// How many of some texts differ.
fn differing(a: &[Vec<u32>], b: &[Vec<u32>]) -> usize {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).filter(|(a, b)| a != b).count()
}

#[test]
fn each_of_64_texts_has_the_tokens_that_it_has_alone() {
    let Some(gpu) = gpu() else { return };
    let requests: Vec<Request> = (0..64).map(|i| request(i, 1 + (i * 37) % 290, 6 + i % 7)).collect();
    for (activations, kv, format) in [
        (Float::F16, KvType::F16, Some("w4a16-g128")),
        (Float::F32, KvType::F32, None),
        (Float::F16, KvType::Int8, None),
    ] {
        let options_of_model = LoadOptions { kv: Some(kv), ..options(on(&gpu, activations), format) };
        let model = Model::load(&stdlib(), &options_of_model).unwrap();
        // Pages for some of them: texts are preempted, and wait.
        for (positions, batch_invariant) in [(128 * 30, true), (1 << 15, false)] {
            let options = Options { positions, chunk: 128, batch_invariant, ..Options::default() };
            let (together, preempted) = written(&model, &requests, options);
            let alone: Vec<_> =
                requests.iter().flat_map(|one| written(&model, std::slice::from_ref(one), options).0).collect();
            let differ = differing(&together, &alone);
            println!(
                "{activations} {kv} {format:?}, {positions} positions: {differ} of 64 differ, {preempted} preempted"
            );
            // Else sums may be added in another order where texts go through the layers together.
            let most = if kv == KvType::Int8 { 12 } else { 6 };
            assert!(differ <= if batch_invariant { 0 } else { most }, "{differ} differ");
            assert!(!batch_invariant || preempted > 0);
        }
    }
}

#[test]
fn texts_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let requests: Vec<Request> = (0..40).map(|i| request(3 * i, 1 + (i * 53) % 400, 24)).collect();
    let options_of = |chunk| Options { positions: 1 << 15, chunk, texts: 24, ..Options::default() };
    // Codes are those of keys and values that were rounded otherwise before.
    for (activations, kv, most) in [
        (Float::F32, KvType::F32, 1),
        (Float::F16, KvType::F16, 6),
        (Float::F32, KvType::Int8, 6),
        (Float::F16, KvType::Int8, 6),
    ] {
        let with = |device, kv| LoadOptions { kv: Some(kv), ..options(device, None) };
        let of_cpu = if kv == KvType::Int8 { kv } else { KvType::F32 };
        let on_cpu = Model::load(&stdlib(), &with(Device::Cpu, of_cpu)).unwrap();
        let (want, _) = written(&on_cpu, &requests, options_of(96));
        let model = Model::load(&stdlib(), &with(on(&gpu, activations), kv)).unwrap();
        for chunk in [96, 1000] {
            let (got, _) = written(&model, &requests, options_of(chunk));
            let differ = differing(&got, &want);
            println!("{activations}, {kv}, chunks of {chunk}: {differ} of 40 texts differ");
            assert!(differ <= most, "{activations}, {kv}: {differ} differ");
        }
    }
}

#[test]
fn a_text_that_is_cancelled_ends_and_the_others_go_on() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    let model = Model::load(&stdlib(), &options(on(&gpu, Float::F16), None)).unwrap();
    let options = Options { positions: 128 * 12, ..Options::default() };
    let (mut scheduler, queue) = Scheduler::new(&model, &cpu, options).unwrap();
    let longest = queue.submit(request(1, 128 * 12, 1));
    assert!(longest.is_err(), "longer than the context");
    let mut handles: Vec<Handle> = (0..9).map(|i| queue.submit(request(3 * i, 140, 20)).unwrap()).collect();
    for _ in 0..6 {
        assert!(scheduler.step().unwrap());
    }
    handles[0].cancel();
    drop(handles.remove(1));
    drop(queue);
    scheduler.run().unwrap();
    assert!(handles[0].rest().unwrap().len() < 20 && handles[0].finish() == Some(Finish::Cancelled));
    for handle in &mut handles[1..] {
        assert_eq!((handle.rest().unwrap().len(), handle.finish()), (20, Some(Finish::Length)));
    }
    scheduler.forget_prefixes().unwrap();
    assert_eq!(scheduler.free_pages(), scheduler.pages());
}

#[test]
fn vectors_of_texts_are_those_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    let vectors = |model: &Model| -> Vec<Vec<f32>> {
        let (mut scheduler, queue) = Scheduler::new(model, &cpu, Options { chunk: 128, ..Options::default() }).unwrap();
        let handles: Vec<_> = (0..5).map(|i| queue.submit_vector(request(i, 1 + i * 90, 1).prompt).unwrap()).collect();
        // A text beside them that is written.
        let mut beside = queue.submit(request(9, 30, 12)).unwrap();
        drop(queue);
        scheduler.run().unwrap();
        assert_eq!(beside.rest().unwrap().len(), 12);
        assert_eq!(scheduler.counts().used_pages, 0);
        handles.into_iter().map(|handle| handle.wait().unwrap()).collect()
    };
    let want = vectors(&Model::load(&stdlib(), &options(Device::Cpu, None)).unwrap());
    for (activations, most) in [(Float::F32, 1e-3), (Float::F16, 2e-2)] {
        let got = vectors(&Model::load(&stdlib(), &options(on(&gpu, activations), None)).unwrap());
        for (a, b) in got.iter().zip(&want) {
            let (apart, length) = a.iter().zip(b).fold((0f32, 0f32), |(d, n), (x, y)| (d + (x - y).powi(2), n + y * y));
            assert!(a.len() == b.len() && (apart / length).sqrt() < most, "{activations}: {}", (apart / length).sqrt());
        }
    }
}

#[test]
fn a_step_of_many_texts_that_is_profiled_leaves_them_as_another_does() {
    let Some(gpu) = gpu() else { return };
    let cpu = Cpu::all_threads().unwrap();
    let texts = 5;
    let written = |model: &Model, profiled: bool| {
        let (mut scheduler, queue) = Scheduler::new(model, &cpu, Options::default()).unwrap();
        let submit =
            |i| queue.submit(Request { sampling: Sampling::default(), ..request(i, 10 + 70 * i, 12) }).unwrap();
        let mut handles: Vec<Handle> = (0..texts).map(submit).collect();
        drop(queue);
        // The fourth step was begun before its tokens were known.
        (0..3).for_each(|_| assert!(scheduler.step().unwrap()));
        let profile = profiled.then(|| scheduler.profile().unwrap().unwrap());
        scheduler.run().unwrap();
        (handles.iter_mut().map(|handle| handle.rest().unwrap()).collect::<Vec<_>>(), profile)
    };
    let (_, of_cpu) = written(&Model::load(&stdlib(), &options(Device::Cpu, None)).unwrap(), true);
    let want: Vec<_> =
        of_cpu.unwrap().steps.into_iter().map(|step| (step.name, step.layer, step.rows, step.flop)).collect();
    for activations in [Float::F32, Float::F16] {
        let model = Model::load(&stdlib(), &options(on(&gpu, activations), None)).unwrap();
        let (got, profile) = written(&model, true);
        assert_eq!(got, written(&model, false).0, "{activations}");
        let steps = profile.unwrap().steps;
        assert!(steps.iter().all(|step| !step.kernel.is_empty() && step.bytes > 0.0 && step.seconds > 0.0));
        let steps: Vec<_> = steps.into_iter().map(|step| (step.name, step.layer, step.rows, step.flop)).collect();
        assert_eq!(steps, want, "{activations}");
    }
}
