//! Many texts against each of them alone, and what may go wrong with one.

use super::*;
use crate::{LoadOptions, Sampling};
use halfbyte::cpu::attention::PAGE_LENGTH;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex};

fn model() -> (Cpu, Model) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stdlib-11m");
    (Cpu::all_threads().unwrap(), Model::load(&folder, &LoadOptions::default()).unwrap())
}

/// Prompts that differ; every fourth begins as the others of its kind.
fn request(i: usize, prompt: usize, max_tokens: usize) -> Request {
    let token = |p: usize| match i % 4 {
        0 if p < 150 => (p * 31 % 4000) as u32 + 1,
        _ => ((p * 131 + i * 977 + p * p * 7) % 4000) as u32 + 1,
    };
    let prompt = (0..prompt).map(token).collect();
    let sampling = Sampling {
        temperature: if i.is_multiple_of(3) { 0.0 } else { 0.9 },
        top_k: 40,
        seed: i as u64,
        ..Sampling::default()
    };
    Request { prompt, max_tokens, sampling, end_tokens: Vec::new() }
}

fn alone(cpu: &Cpu, model: &Model, request: &Request, options: Options) -> (Vec<u32>, Option<Finish>) {
    let (mut scheduler, queue) = Scheduler::new(model, cpu, options).unwrap();
    let mut handle = queue.submit(request.clone()).unwrap();
    drop(queue);
    scheduler.run().unwrap();
    (handle.rest().unwrap(), handle.finish())
}

fn all_pages_return(scheduler: &mut Scheduler<'_>) {
    scheduler.forget_prefixes().unwrap();
    assert_eq!(scheduler.free_pages(), scheduler.pages(), "{scheduler:?}");
}

/// Writes down the bits of all logits.
#[derive(Debug)]
struct Recorder<'m> {
    texts: Box<dyn Texts + 'm>,
    bits: Arc<Mutex<HashSet<Vec<u32>>>>,
}

impl Texts for Recorder<'_> {
    fn page_length(&self) -> usize {
        self.texts.page_length()
    }
    fn pages(&self) -> usize {
        self.texts.pages()
    }
    fn free_pages(&self) -> usize {
        self.texts.free_pages()
    }
    fn pages_of(&self, texts: &[TextId]) -> usize {
        self.texts.pages_of(texts)
    }
    fn vectors(&mut self, out: &mut Vec<f32>) -> Result<()> {
        self.texts.vectors(out)
    }
    fn begin(&mut self) -> TextId {
        self.texts.begin()
    }
    fn share(&mut self, from: TextId, positions: usize) -> Result<TextId> {
        self.texts.share(from, positions)
    }
    fn truncate(&mut self, text: TextId, position: usize) -> Result<()> {
        self.texts.truncate(text, position)
    }
    fn end(&mut self, text: TextId) -> Result<()> {
        self.texts.end(text)
    }
    fn missing_pages(&self, text: TextId, positions: usize) -> usize {
        self.texts.missing_pages(text, positions)
    }
    fn reserve(&mut self, text: TextId, positions: usize) -> Result<()> {
        self.texts.reserve(text, positions)
    }
    fn read(&mut self, rows: &[Rows<'_>], wanted: usize) -> Result<()> {
        self.texts.read(rows, wanted)?;
        let mut logits = Vec::new();
        self.logits(&mut logits)?;
        assert_eq!(logits.len(), wanted * 4096);
        let bits = logits.chunks_exact(4096).map(|row| row.iter().map(|v| v.to_bits()).collect());
        self.bits.lock().unwrap().extend(bits);
        Ok(())
    }
    fn profile(&mut self, rows: &[Rows<'_>], wanted: usize) -> Result<Profile> {
        self.texts.profile(rows, wanted)
    }
    fn logits(&mut self, out: &mut Vec<f32>) -> Result<()> {
        self.texts.logits(out)
    }
    fn choose(&mut self, samplers: &mut [&mut Sampler], ahead: bool) -> Result<Vec<Result<u32>>> {
        self.texts.choose(samplers, ahead)
    }
    fn is_ahead(&self) -> bool {
        self.texts.is_ahead()
    }
}

/// The bits of the logits of some texts that are written together, and how often one of them was preempted.
fn bits(cpu: &Cpu, model: &Model, requests: &[Request], options: Options) -> (HashSet<Vec<u32>>, u64) {
    let (mut scheduler, queue) = Scheduler::new(model, cpu, options).unwrap();
    let bits = Arc::new(Mutex::new(HashSet::new()));
    let texts = scheduler.texts;
    scheduler.texts = Box::new(Recorder { texts, bits: bits.clone() });
    let handles: Vec<Handle> = requests.iter().map(|request| queue.submit(request.clone()).unwrap()).collect();
    drop(queue);
    scheduler.run().unwrap();
    drop(handles);
    let preempted = scheduler.preempted();
    drop(scheduler);
    (Arc::into_inner(bits).unwrap().into_inner().unwrap(), preempted)
}

#[test]
fn batch_invariant_texts_have_the_bits_that_they_have_alone() {
    let (cpu, model) = model();
    let requests: Vec<Request> = (0..12).map(|i| request(i, 100 + (i * 37) % 190, 40)).collect();
    let options = Options { positions: 128 * 10, chunk: 128, batch_invariant: true, ..Options::default() };
    let (together, preempted) = bits(&cpu, &model, &requests, options);
    assert!(preempted > 0);
    for (i, request) in requests.iter().enumerate() {
        let (alone, _) = bits(&cpu, &model, std::slice::from_ref(request), options);
        assert!(alone.len() == 40 && alone.is_subset(&together), "text {i}");
    }
    // Without it they have not: the test can fail.
    let (together, _) = bits(&cpu, &model, &requests, Options { batch_invariant: false, ..options });
    let differs =
        |request: &Request| !bits(&cpu, &model, std::slice::from_ref(request), options).0.is_subset(&together);
    assert!(requests.iter().any(differs));
}

#[test]
fn each_of_64_texts_has_the_tokens_that_it_has_alone() {
    let (cpu, model) = model();
    let requests: Vec<Request> = (0..64).map(|i| request(i, 1 + (i * 37) % 150, 6 + i % 7)).collect();
    // Pages for half of them: some are preempted, some wait.
    for (positions, batch_invariant) in [(128 * 60, true), (1 << 15, false)] {
        let options = Options { positions, chunk: 128, batch_invariant, ..Options::default() };
        let (mut scheduler, queue) = Scheduler::new(&model, &cpu, options).unwrap();
        let mut handles: Vec<Handle> = requests.iter().map(|request| queue.submit(request.clone()).unwrap()).collect();
        drop(queue);
        scheduler.run().unwrap();
        let mut differing = 0;
        for (i, (handle, request)) in handles.iter_mut().zip(&requests).enumerate() {
            let got = handle.rest().unwrap();
            assert_eq!((got.len(), handle.finish()), (request.max_tokens, Some(Finish::Length)));
            let (want, _) = alone(&cpu, &model, request, options);
            // Sums may be added in another order where texts go through the layers together: a draw may fall differently.
            if batch_invariant || i % 3 == 0 {
                assert_eq!(got, want, "text {i}")
            } else {
                differing += usize::from(got != want)
            }
        }
        assert!(differing <= 2, "{differing} of 64 differ");
        all_pages_return(&mut scheduler);
    }
}

#[test]
fn texts_beside_each_other_differ_by_rounding_at_most() {
    let (cpu, model) = model();
    let ids = |i: usize, n: usize| request(i, n, 1).prompt;
    let bits = |batches: &[Vec<(usize, Vec<u32>)>], of: usize| {
        let mut texts = model.begin_many(&cpu, Room { positions: 4096, longest: 512, texts: 5, rows: 256 }).unwrap();
        let names: Vec<TextId> = (0..5).map(|_| texts.begin()).collect();
        let (mut logits, mut out, mut read) = (Vec::new(), Vec::new(), BTreeMap::new());
        for batch in batches {
            let rows: Vec<Rows<'_>> = batch.iter().map(|(i, tokens)| Rows { text: names[*i], tokens }).collect();
            for Rows { text, tokens } in &rows {
                *read.entry(*text).or_insert(0) += tokens.len();
                texts.reserve(*text, read[text]).unwrap();
            }
            texts.read(&rows, rows.len()).unwrap();
            texts.logits(&mut logits).unwrap();
            if let Some(at) = batch.iter().position(|(i, _)| *i == of) {
                out.push(logits[at * 4096..(at + 1) * 4096].to_vec());
            }
        }
        out
    };
    let beside = [
        vec![(0, ids(0, 3)), (1, ids(1, 20)), (2, ids(2, 150))],
        (0..5).map(|i| (i, ids(i + 9, 1))).collect(),
        vec![(1, ids(5, 1)), (2, ids(6, 9))],
    ];
    let mut worst = 0f32;
    for of in 0..3 {
        let own: Vec<_> =
            beside.iter().map(|batch| batch.iter().filter(|(i, _)| *i == of).cloned().collect::<Vec<_>>()).collect();
        let own: Vec<_> = own.into_iter().filter(|batch| !batch.is_empty()).collect();
        for (a, b) in bits(&beside, of).iter().flatten().zip(bits(&own, of).iter().flatten()) {
            worst = worst.max((a - b).abs());
        }
    }
    // Logits are of the size of ten.
    assert!(worst < 1e-3, "{worst}");
}

#[test]
fn a_text_that_is_cancelled_or_dropped_ends_and_the_others_go_on() {
    let (cpu, model) = model();
    let (mut scheduler, queue) = Scheduler::new(&model, &cpu, Options::default()).unwrap();
    let mut handles: Vec<Handle> = (1..4).map(|i| queue.submit(request(i, 140, 20)).unwrap()).collect();
    let waits = queue.submit(request(5, 10, 0)).unwrap();
    for _ in 0..6 {
        assert!(scheduler.step().unwrap());
    }
    handles[0].cancel();
    drop(handles.remove(1));
    drop((queue, waits));
    scheduler.run().unwrap();
    let first = handles[0].rest().unwrap();
    assert!((1..20).contains(&first.len()) && handles[0].finish() == Some(Finish::Cancelled), "{}", first.len());
    assert_eq!(handles[1].rest().unwrap(), alone(&cpu, &model, &request(3, 140, 20), Options::default()).0);
    all_pages_return(&mut scheduler);
}

#[test]
fn a_reader_that_stops_reading_stops_its_own_text_only() {
    let (cpu, model) = model();
    // Pages for one of them at a time: the one that waits for its reader must give them up.
    let options = Options { positions: 256, unread: 3, batch_invariant: true, ..Options::default() };
    let (mut scheduler, queue) = Scheduler::new(&model, &cpu, options).unwrap();
    let mut slow = queue.submit(request(1, 130, 9)).unwrap();
    let mut quick = queue.submit(request(2, 130, 9)).unwrap();
    drop(queue);
    let (slow, quick) = std::thread::scope(|scope| {
        let running = scope.spawn(|| scheduler.run());
        let quick = quick.rest().unwrap();
        let slow = slow.rest().unwrap();
        running.join().unwrap().unwrap();
        (slow, quick)
    });
    let patient = Options { unread: 99, ..options };
    assert_eq!(slow, alone(&cpu, &model, &request(1, 130, 9), patient).0);
    assert_eq!(quick, alone(&cpu, &model, &request(2, 130, 9), patient).0);
    assert!(scheduler.preempted() > 0);
    all_pages_return(&mut scheduler);
}

#[test]
fn what_cannot_be_is_refused_at_once_and_a_full_budget_ends_a_text() {
    let (cpu, model) = model();
    let options = Options { positions: 256, ..Options::default() };
    let (mut scheduler, queue) = Scheduler::new(&model, &cpu, options).unwrap();
    let refused = |request: Request| queue.submit(request).unwrap_err();
    assert!(matches!(refused(request(1, 257, 1)), Error::ContextFull { limit: 256, got: 257 }));
    assert!(matches!(refused(request(1, 0, 1)), Error::EmptyPrompt));
    assert!(matches!(
        refused(Request { prompt: vec![4096], ..request(1, 1, 1) }),
        Error::UnknownToken { id: 4096, .. }
    ));
    let sampling = Sampling { temperature: -1.0, ..Sampling::default() };
    assert!(matches!(refused(Request { sampling, ..request(1, 1, 1) }), Error::Invalid { .. }));
    // Pages are whole, and no text may fill what they have beyond the positions.
    let (_uneven, of_uneven) = Scheduler::new(&model, &cpu, Options { positions: 200, ..options }).unwrap();
    assert!(of_uneven.submit(request(1, 200, 1)).is_ok());
    assert!(matches!(of_uneven.submit(request(1, 201, 1)), Err(Error::ContextFull { limit: 200, got: 201 })));
    for options in [Options { chunk: 0, ..options }, Options { positions: 0, ..options }] {
        assert!(Scheduler::new(&model, &cpu, options).is_err());
    }
    let mut full = queue.submit(request(1, 250, 50)).unwrap();
    let mut none = queue.submit(request(2, 5, 0)).unwrap();
    let late = queue.clone();
    drop(queue);
    while scheduler.step().unwrap() {}
    // The last token is not read: as in a session.
    assert_eq!((full.rest().unwrap().len(), full.finish()), (7, Some(Finish::Context)));
    assert_eq!((none.rest().unwrap().len(), none.finish()), (0, Some(Finish::Length)));
    all_pages_return(&mut scheduler);
    let mut left = late.submit(request(1, 5, 5)).unwrap();
    drop(scheduler);
    assert!(matches!(left.next(), Some(Err(Error::Stopped))) && left.next().is_none());
    assert!(matches!(late.submit(request(1, 5, 5)), Err(Error::Stopped)));
}

#[test]
fn memory_that_runs_out_is_taken_from_the_last_that_came() {
    let (cpu, model) = model();
    // Two texts fit until they pass 128 tokens; then the younger waits.
    let options = Options { positions: 384, batch_invariant: true, ..Options::default() };
    let (mut scheduler, queue) = Scheduler::new(&model, &cpu, options).unwrap();
    let requests: Vec<Request> = (1..4).map(|i| request(i, 120, 30)).collect();
    let mut handles: Vec<Handle> = requests.iter().map(|request| queue.submit(request.clone()).unwrap()).collect();
    drop(queue);
    scheduler.run().unwrap();
    assert!(scheduler.preempted() > 0);
    for (handle, request) in handles.iter_mut().zip(&requests) {
        assert_eq!(handle.rest().unwrap(), alone(&cpu, &model, request, options).0);
    }
    all_pages_return(&mut scheduler);
}

#[test]
fn beginnings_are_shared_and_a_chunk_is_the_most_that_a_step_reads_of_prompts() {
    let (cpu, model) = model();
    let options = Options { chunk: 64, ..Options::default() };
    let (mut scheduler, queue) = Scheduler::new(&model, &cpu, options).unwrap();
    let pages = scheduler.pages();
    let mut first = queue.submit(request(0, 140, 2)).unwrap();
    let mut steps = 0;
    while scheduler.step().unwrap() {
        steps += 1;
    }
    // 140 tokens in chunks of 64, then one token.
    assert_eq!((steps, scheduler.free_pages()), (4, pages - 1), "a whole page is left for others");
    let mut second = queue.submit(request(4, 148, 2)).unwrap();
    steps = 0;
    while scheduler.step().unwrap() {
        steps += 1;
    }
    assert_eq!(steps, 2, "20 tokens are new");
    assert_eq!((first.rest().unwrap().len(), second.rest().unwrap().len()), (2, 2));
    let want = alone(&cpu, &model, &request(4, 148, 40), options).0;
    let mut third = queue.submit(request(4, 148, 40)).unwrap();
    let mut joins = queue.submit(request(2, 300, 1)).unwrap();
    let mut seen = 0;
    while third.unread() < 40 {
        assert!(scheduler.step().unwrap());
        let unread = third.unread();
        assert!(unread > seen, "a text beside a long prompt waits for no step");
        seen = unread;
    }
    while scheduler.step().unwrap() {}
    assert_eq!((third.rest().unwrap(), joins.rest().unwrap().len()), (want, 1));
    all_pages_return(&mut scheduler);
}

/// A text that has to wait whatever is let go keeps nobody from finding a beginning there.
#[test]
fn beginnings_are_not_thrown_away_for_a_text_that_cannot_run_yet() {
    let (cpu, model) = model();
    let options = Options { positions: 8 * PAGE_LENGTH, ..Options::default() };
    let (mut scheduler, queue) = Scheduler::new(&model, &cpu, options).unwrap();
    let mut ended = queue.submit(request(0, 2 * PAGE_LENGTH + 1, 1)).unwrap();
    while scheduler.step().unwrap() {}
    let kept = |scheduler: &Scheduler<'_>| {
        let Counts { pages, free_pages, used_pages, .. } = scheduler.counts();
        pages - free_pages - used_pages
    };
    assert_eq!((kept(&scheduler), ended.rest().unwrap().len()), (2, 1));
    // Four pages run, and grow to five; with all others, kept or free, there are too few for the five of the next.
    let mut runs = queue.submit(request(1, 4 * PAGE_LENGTH - 20, 30)).unwrap();
    while runs.unread() < 2 {
        assert!(scheduler.step().unwrap());
    }
    let mut waits = queue.submit(request(2, 5 * PAGE_LENGTH, 1)).unwrap();
    assert!(scheduler.step().unwrap());
    assert_eq!((scheduler.counts().waiting, kept(&scheduler)), (1, 2));
    while scheduler.step().unwrap() {}
    assert_eq!((runs.rest().unwrap().len(), waits.rest().unwrap().len()), (30, 1));
    all_pages_return(&mut scheduler);
}

#[test]
fn readers_that_poll_are_woken_and_get_what_the_others_get() {
    use std::future::poll_fn;
    use std::task::{Context, Poll, Wake, Waker};

    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    fn block_on<F: Future>(future: F) -> F::Output {
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut future = std::pin::pin!(future);
        loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(output) => return output,
                Poll::Pending => std::thread::park_timeout(std::time::Duration::from_secs(60)),
            }
        }
    }

    let (cpu, model) = model();
    let options = Options { unread: 4, batch_invariant: true, ..Options::default() };
    let (mut scheduler, queue) = Scheduler::new(&model, &cpu, options).unwrap();
    let requests: Vec<Request> = (0..6).map(|i| request(i, 40 + i, 30)).collect();
    let (mut told, mut written) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            scheduler.run_and_tell(&mut |scheduler| told.push(scheduler.counts())).unwrap();
        });
        for request in &requests {
            let extras = Extras { logprobs: Some(2), ..Extras::default() };
            let mut handle = queue.submit_with(request.clone(), extras).unwrap();
            let mut got = Vec::new();
            while let Some(chosen) = block_on(poll_fn(|context| handle.poll(context))) {
                let Chosen { token, logprobs } = chosen.unwrap();
                let LogProbs { chosen, top } = logprobs.unwrap();
                assert!(chosen.token == token && chosen.logprob <= top[0].logprob && top.len() == 2);
                assert!(request.sampling.temperature > 0.0 || chosen == top[0]);
                got.push(token);
            }
            written.push((got, handle.finish()));
        }
        drop(queue);
        running.join().unwrap();
    });
    for (request, (got, finish)) in requests.iter().zip(written) {
        let (want, _) = alone(&cpu, &model, request, Options { unread: 256, ..options });
        assert_eq!((got, finish), (want, Some(Finish::Length)));
    }
    assert!(told.iter().any(|counts| counts.running == 1 && counts.used_pages > 0));
    let last = *told.last().unwrap();
    assert_eq!((last.running, last.waiting, last.used_pages, last.chosen_tokens), (0, 0, 0, 180));
    all_pages_return(&mut scheduler);
}

/// The last queue gives a text and goes, when the scheduler has looked for texts and found none.
#[test]
fn a_text_that_comes_as_the_last_queue_goes_is_written() {
    let (cpu, model) = model();
    let (mut scheduler, queue) = Scheduler::new(&model, &cpu, Options::default()).unwrap();
    let (mut queue, mut handle) = (Some(queue), None);
    let mut submit = |_: &Scheduler<'_>| {
        if let Some(queue) = queue.take() {
            handle = Some(queue.submit(request(0, 12, 3)).unwrap());
        }
    };
    scheduler.run_and_tell(&mut submit).unwrap();
    // A text that is left behind would be told.
    drop(scheduler);
    let mut handle = handle.unwrap();
    assert_eq!((handle.rest().unwrap().len(), handle.finish()), (3, Some(Finish::Length)));
}

#[test]
fn biases_and_the_vector_of_a_text() {
    let (cpu, model) = model();
    let (mut scheduler, queue) = Scheduler::new(&model, &cpu, Options::default()).unwrap();
    let extras = Extras { bias: vec![(77, 1000.0)], ..Extras::default() };
    let mut biased = queue.submit_with(request(0, 12, 3), extras).unwrap();
    let mut plain = queue.submit(request(0, 12, 3)).unwrap();
    let text = request(1, 300, 1).prompt;
    let vectors = [queue.submit_vector(text.clone()).unwrap(), queue.submit_vector(text[..20].to_vec()).unwrap()];
    assert!(matches!(queue.submit_vector(Vec::new()), Err(Error::EmptyPrompt)));
    drop(queue);
    scheduler.run().unwrap();
    assert_eq!(biased.rest().unwrap(), [77; 3]);
    assert_ne!(plain.rest().unwrap(), [77; 3]);
    let [whole, beginning] = vectors.map(|vector| vector.wait().unwrap());
    assert!(whole.len() == 384 && whole != beginning);
    // The head is the embedding: the vector with the head is what the logits of the text are.
    let mut session = crate::Session::new(&model, &cpu, 400).unwrap();
    let logits = session.prefill(&text).unwrap().to_vec();
    let weights =
        halfbyte_checkpoint::Weights::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stdlib-11m"));
    let embedding = weights.unwrap().checkpoint().floats("model.embed_tokens.weight").unwrap().to_f32();
    for token in [0usize, 5, 4095] {
        let row = &embedding[token * 384..(token + 1) * 384];
        let product: f32 = row.iter().zip(&whole).map(|(a, b)| a * b).sum();
        assert!((product - logits[token]).abs() < 1e-2, "{product} {}", logits[token]);
    }
    all_pages_return(&mut scheduler);
}
