//! Random schedules over a model that is a sum, with pages of four positions: nothing hangs, no page is lost, no token is another.

use super::*;
use crate::Sampling;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const PAGE: usize = 4;
const VOCAB: usize = 11;
/// What some texts come to: a model that computes NaN.
const BROKEN: u64 = 29;

/// What follows some tokens; None where the model breaks.
fn following(tokens: &[u32]) -> Option<u32> {
    let sum = tokens
        .iter()
        .fold(7u64, |sum, &token| sum.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(u64::from(token) + 1));
    let sum = sum >> 33;
    (!sum.is_multiple_of(BROKEN)).then_some((sum % VOCAB as u64) as u32)
}

/// Tokens of each text, and the pages that they lie in.
#[derive(Debug, Default)]
struct Toy {
    total: usize,
    begun: u64,
    named: usize,
    texts: BTreeMap<TextId, (Vec<u32>, Vec<usize>)>,
    chunk: usize,
    /// The texts of the last step; what of them is read ahead, and steps that were.
    read_last: Vec<TextId>,
    ahead: BTreeMap<TextId, Option<u32>>,
    steps_ahead: Arc<AtomicUsize>,
    logits: Vec<f32>,
    /// Of each text that is wanted, the number of its tokens.
    vectors: Vec<f32>,
}

impl Toy {
    fn add(&mut self, tokens: Vec<u32>, pages: Vec<usize>) -> TextId {
        self.begun += 1;
        self.texts.insert(TextId(self.begun), (tokens, pages));
        TextId(self.begun)
    }
}

impl Texts for Toy {
    fn page_length(&self) -> usize {
        PAGE
    }
    fn pages(&self) -> usize {
        self.total
    }
    fn free_pages(&self) -> usize {
        self.total - self.texts.values().flat_map(|(_, pages)| pages).collect::<BTreeSet<_>>().len()
    }
    fn pages_of(&self, texts: &[TextId]) -> usize {
        texts.iter().flat_map(|text| &self.texts[text].1).collect::<BTreeSet<_>>().len()
    }
    fn begin(&mut self) -> TextId {
        self.add(Vec::new(), Vec::new())
    }
    fn share(&mut self, from: TextId, positions: usize) -> Result<TextId> {
        let (tokens, pages) = &self.texts[&from];
        assert!(positions.is_multiple_of(PAGE) && positions <= tokens.len());
        let (tokens, pages) = (tokens[..positions].to_vec(), pages[..positions / PAGE].to_vec());
        Ok(self.add(tokens, pages))
    }
    fn truncate(&mut self, text: TextId, position: usize) -> Result<()> {
        let (tokens, pages) = self.texts.get_mut(&text).unwrap();
        tokens.truncate(position);
        pages.truncate(position.div_ceil(PAGE));
        Ok(())
    }
    fn end(&mut self, text: TextId) -> Result<()> {
        self.texts.remove(&text).unwrap();
        Ok(())
    }
    fn missing_pages(&self, text: TextId, positions: usize) -> usize {
        positions.div_ceil(PAGE).saturating_sub(self.texts[&text].1.len())
    }
    fn reserve(&mut self, text: TextId, positions: usize) -> Result<()> {
        let missing = self.missing_pages(text, positions);
        assert!(missing <= self.free_pages(), "more than there is");
        let taken = self.named..self.named + missing;
        self.named += missing;
        self.texts.get_mut(&text).unwrap().1.extend(taken);
        Ok(())
    }
    fn read(&mut self, rows: &[Rows<'_>], wanted: usize) -> Result<()> {
        let prompts: usize = rows.iter().map(|rows| rows.tokens.len()).filter(|&n| n > 1).sum();
        assert!(!rows.is_empty() && prompts <= self.chunk && rows.iter().all(|rows| !rows.tokens.is_empty()));
        assert_eq!(rows.iter().map(|rows| rows.text).collect::<BTreeSet<_>>().len(), rows.len(), "a text twice");
        let is_ahead =
            |row: &Rows<'_>| self.ahead.get(&row.text).is_some_and(|&token| token == row.tokens.first().copied());
        // What is read already is not read beside prompts of others; a text that stopped for its reader may come back.
        let known = rows.iter().filter(|row| is_ahead(row)).count();
        assert!(known == 0 || rows.iter().all(|row| row.tokens.len() == 1), "prompts beside what was read ahead");
        self.steps_ahead.fetch_add(usize::from(known == rows.len()), Ordering::Relaxed);
        self.ahead.clear();
        self.read_last = rows.iter().map(|row| row.text).collect();
        self.logits.clear();
        self.vectors.clear();
        for (i, row) in rows.iter().enumerate() {
            let (tokens, pages) = self.texts.get_mut(&row.text).unwrap();
            tokens.extend(row.tokens);
            assert!(tokens.len() <= pages.len() * PAGE, "no page was reserved");
            if i < wanted {
                self.vectors.push(tokens.len() as f32);
                let next = following(tokens);
                self.logits.extend(
                    (0..VOCAB as u32).map(|t| if next.is_none() { f32::NAN } else { f32::from(Some(t) == next) }),
                );
            }
        }
        Ok(())
    }
    fn logits(&mut self, out: &mut Vec<f32>) -> Result<()> {
        out.clone_from(&self.logits);
        Ok(())
    }
    fn vectors(&mut self, out: &mut Vec<f32>) -> Result<()> {
        out.clone_from(&self.vectors);
        Ok(())
    }
    fn profile(&mut self, rows: &[Rows<'_>], wanted: usize) -> Result<Profile> {
        self.read(rows, wanted)?;
        Ok(Profile { steps: Vec::new(), seconds: rows.len() as f64 })
    }
    fn choose(&mut self, samplers: &mut [&mut Sampler], ahead: bool) -> Result<Vec<Result<u32>>> {
        assert!(self.logits.len() >= samplers.len() * VOCAB);
        let tokens: Vec<Result<u32>> =
            samplers.iter_mut().zip(self.logits.chunks_exact(VOCAB)).map(|(s, logits)| s.next(logits)).collect();
        self.ahead.clear();
        if ahead {
            assert_eq!(self.read_last.len(), tokens.len(), "texts that nothing was chosen for");
            for text in &self.read_last {
                let (tokens, pages) = &self.texts[text];
                assert!(tokens.len() < pages.len() * PAGE, "no page was reserved for what is read ahead");
            }
            self.ahead = self.read_last.iter().copied().zip(tokens.iter().map(|t| t.as_ref().ok().copied())).collect();
        }
        Ok(tokens)
    }
    fn is_ahead(&self) -> bool {
        !self.ahead.is_empty()
    }
}

/// A text in the hands of a reader.
struct Reader {
    handle: Handle,
    request: Request,
    got: Vec<u32>,
    failed: bool,
    cancelled: bool,
}

impl Reader {
    fn read(&mut self) {
        match self.handle.next() {
            Some(Ok(token)) => self.got.push(token),
            Some(Err(Error::NotFinite(_))) => self.failed = true,
            Some(Err(other)) => panic!("{other}"),
            None => {}
        }
    }

    /// What was read is what the model says, and it ended as it must.
    fn check(&self, longest: usize) {
        let mut tokens = self.request.prompt.clone();
        let end = loop {
            let written = tokens.len() - self.request.prompt.len();
            if written == self.request.max_tokens {
                break Some(Finish::Length);
            }
            if tokens.len() > longest {
                break Some(Finish::Context);
            }
            match following(&tokens) {
                None => break None,
                Some(token) if self.request.end_tokens.contains(&token) => break Some(Finish::End),
                Some(token) => tokens.push(token),
            }
        };
        let want = &tokens[self.request.prompt.len()..];
        if self.cancelled && self.handle.finish() == Some(Finish::Cancelled) {
            return assert!(want.starts_with(&self.got), "{:?} of {want:?}", self.got);
        }
        assert_eq!((self.got.as_slice(), self.failed), (want, end.is_none()));
        assert!(self.failed || self.handle.finish() == end, "{:?}, {end:?}", self.handle.finish());
    }
}

#[test]
fn whatever_comes_in_whatever_order() {
    let (mut preempted, mut failed, mut cancelled, mut finished, mut stopped, mut of_vectors) = (0, 0, 0, 0, 0, 0);
    let steps_ahead = Arc::new(AtomicUsize::new(0));
    for seed in 0..400u64 {
        let mut state = seed * 977 + 1;
        let mut below = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        let (total, chunk, max_context) = (1 + below(10), 1 + below(9), 1 + below(40));
        let options = Options {
            positions: total * PAGE,
            chunk,
            texts: 1 + below(6),
            unread: 1 + below(4),
            batch_invariant: below(3) == 0,
        };
        let toy = Toy { total, chunk, steps_ahead: steps_ahead.clone(), ..Toy::default() };
        let (mut scheduler, queue) = Scheduler::over(|| Ok(Box::new(toy)), VOCAB, max_context, options).unwrap();
        let longest = max_context.min(total * PAGE);
        let mut readers: Vec<Reader> = Vec::new();
        let mut vectors: Vec<(usize, VectorHandle)> = Vec::new();
        for _ in 0..150 {
            match below(8) {
                0 if readers.len() < 14 => {
                    // Beginnings are alike.
                    let (length, kind) = (1 + below(longest), below(2) as u32);
                    let differs = below(20);
                    let prompt = (0..length).map(|i| if i < differs { kind } else { below(VOCAB) as u32 }).collect();
                    let end_tokens = if below(2) == 0 { vec![3] } else { Vec::new() };
                    let (max_tokens, sampling) = (below(20), Sampling::default());
                    let request = Request { prompt, max_tokens, sampling, end_tokens };
                    let handle = queue.submit(request.clone()).unwrap();
                    readers.push(Reader { handle, request, got: Vec::new(), failed: false, cancelled: false });
                }
                0 => {
                    let length = 1 + below(longest);
                    let vector = queue.submit_vector(vec![1; length]).unwrap();
                    if below(4) > 0 {
                        vectors.push((length, vector));
                    }
                }
                1 | 2 if !readers.is_empty() => {
                    let at = below(readers.len());
                    if readers[at].handle.unread() > 0 {
                        readers[at].read();
                    }
                }
                3 if !readers.is_empty() && below(8) == 0 => {
                    let at = below(readers.len());
                    if below(2) == 0 {
                        drop(readers.swap_remove(at));
                    } else {
                        readers[at].handle.cancel();
                        readers[at].cancelled = true;
                    }
                }
                _ => drop(scheduler.step().unwrap()),
            }
        }
        drop(queue);
        // First one reader does not read, which stops its own text only; then everybody does, and all texts come to their end.
        for silent in [usize::from(!readers.is_empty()), 0] {
            let mut steps = 0;
            loop {
                let went = scheduler.step().unwrap();
                let waiting = readers[silent..].iter_mut().filter(|reader| reader.handle.unread() > 0);
                let read = waiting.map(Reader::read).count();
                if !went && read == 0 {
                    break;
                }
                steps += 1;
                assert!(steps < 10_000, "seed {seed} does not end: {scheduler:?}");
            }
            let left = scheduler.waiting.len() + scheduler.running.len();
            assert!(left <= silent, "seed {seed}: {scheduler:?}");
            stopped += left;
        }
        assert!(scheduler.waiting.is_empty() && scheduler.running.is_empty(), "seed {seed}: {scheduler:?}");
        for reader in &mut readers {
            while reader.handle.finish().is_none() {
                reader.read();
            }
            reader.check(longest);
            failed += u32::from(reader.failed);
            cancelled += u32::from(reader.handle.finish() == Some(Finish::Cancelled) && !reader.failed);
            finished += 1;
        }
        for (length, vector) in vectors {
            assert_eq!(vector.wait().unwrap(), [length as f32]);
            of_vectors += 1;
        }
        assert_eq!(scheduler.counts().used_pages, 0);
        scheduler.forget_prefixes().unwrap();
        assert_eq!(scheduler.free_pages(), scheduler.pages(), "seed {seed}");
        preempted += scheduler.preempted();
    }
    let steps_ahead = steps_ahead.load(Ordering::Relaxed);
    assert!(steps_ahead > 1000, "{steps_ahead} steps were read ahead");
    assert!(stopped > 50 && of_vectors > 200, "{stopped} {of_vectors}");
    assert!(
        preempted > 100 && failed > 50 && cancelled > 20 && finished > 2000,
        "{preempted} {failed} {cancelled} {finished}"
    );
}
