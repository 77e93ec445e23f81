//! Many texts in a model on a GPU.
//!
//! ```text
//! read:    upload tokens, positions, slots and pages in one copy ─ layers ─ head ─ most likely tokens, where the next step reads them
//! choose:  (draws of those that sample) ─ the host sees the tokens, while the layers read them already (`ahead.rs`)
//! ```
//!
//! Rows of texts that read one token come first, then those of chunks. A step in which every text reads one token is recorded when it
//! comes a second time, for each number of texts and each power of two of positions. What lies on the device for it keeps its place. The
//! layers of a text that reads one token alone are one kernel, where the model has it.

use super::CudaModel;
use super::ahead::Ahead;
use super::next::{Chosen, Next};
use super::profile::Timing;
use super::recording::Recordings;
use super::run::{Pages as PagesOfRows, Rows as RowsOfStep, State};
use super::text::{MOST_LIKELY, SHORTEST_RECORDING, draw};
use crate::decoder::Decoder;
use crate::device::{Room, Rows, TextId, Texts};
use crate::error::{Error, Result};
use crate::profile::Profile;
use crate::sampling::Sampler;
use half::{bf16, f16};
use halfbyte::cuda::driver::{Buffer, Uploader, ViewMut};
use halfbyte::cuda::nn::KvCache;
use halfbyte::kv_pages::{PAGE_LENGTH, Pages, Sequence};
use halfbyte::{Cuda, Float};
use std::collections::BTreeMap;
use std::ops::Range;

/// What a device has of a text.
#[derive(Clone, Copy, Debug)]
struct Held {
    sequence: Sequence,
    /// Tokens read.
    len: usize,
}

#[derive(Debug)]
pub(super) struct CudaTexts<'m> {
    model: &'m CudaModel,
    cuda: Cuda,
    /// By the number of texts and the positions that they serve.
    recordings: Recordings<(usize, usize)>,
    state: State,
    next: Next,
    /// The most likely tokens of the last step.
    likely: Chosen,
    room: Room,
    pages: Pages,
    texts: BTreeMap<TextId, Held>,
    begun: u64,
    /// Of rows: tokens, positions, slots; of texts: positions of the last rows, pages.
    words: Buffer<u32>,
    on_host: Vec<u32>,
    uploader: Uploader,
    /// `[texts, vocab]`, in the order in which texts were read.
    logits: Buffer<f32>,
    /// Places there of the texts that were wanted.
    wanted: Vec<usize>,
    /// The texts of the last step, in their places, if each read one token.
    alike: Vec<TextId>,
    ahead: Ahead,
}

/// Where a step's words lie, one kind behind the other.
struct Words {
    tokens: Range<usize>,
    positions: Range<usize>,
    slots: Range<usize>,
    last: Range<usize>,
    tables: Range<usize>,
}

impl Words {
    /// Of so many rows and texts with so many pages each.
    fn of(rows: usize, texts: usize, pages: usize) -> Self {
        let at = |first: usize, len: usize| first..first + len;
        Self {
            tokens: at(0, rows),
            positions: at(rows, rows),
            slots: at(2 * rows, rows),
            last: at(3 * rows, texts),
            tables: at(3 * rows + texts, texts * pages),
        }
    }

    /// The rows whose words lie there, of texts that have up to `longest` positions.
    fn rows<'a>(&self, on_device: &'a Buffer<u32>, longest: usize, chunks: &'a [Range<usize>]) -> RowsOfStep<'a> {
        let all = on_device.view();
        RowsOfStep {
            tokens: all.slice(self.tokens.clone()),
            positions: all.slice(self.positions.clone()),
            longest,
            texts: Some(PagesOfRows {
                slots: all.slice(self.slots.clone()),
                last: all.slice(self.last.clone()),
                tables: all.slice(self.tables.clone()),
                chunks,
            }),
        }
    }

    /// The tokens that come next in so many texts, and their positions.
    fn next<'a>(&self, on_device: &'a mut Buffer<u32>, texts: usize) -> [ViewMut<'a, u32>; 2] {
        let (tokens, others) = on_device.view_mut().split_at(self.positions.start);
        [tokens, others].map(|of_rows| of_rows.slice(0..texts))
    }
}

impl<'m> CudaTexts<'m> {
    /// With so much room; they must meet the other ranks first.
    pub(super) fn new(model: &'m CudaModel, cuda: Cuda, room: Room) -> Result<Self> {
        let (gpu, Decoder { layers, heads, vocab, .. }) = (cuda.gpu(), &model.decoder);
        let pages = room.positions.div_ceil(PAGE_LENGTH);
        let cache = KvCache::new(gpu, layers.len(), *heads, pages * PAGE_LENGTH, model.kv)?;
        let state = State::new(model, &cuda, cache, [room.rows, room.texts, room.longest], true)?;
        let next = Next::new(&cuda, room.texts)?;
        let most = Words::of(room.rows, room.texts, room.longest.div_ceil(PAGE_LENGTH)).tables.end;
        Ok(Self {
            words: gpu.context().allocate(most)?,
            on_host: vec![0; most],
            uploader: Uploader::new(gpu.context()),
            logits: gpu.context().allocate(room.texts * vocab)?,
            model,
            recordings: Recordings::default(),
            state,
            next,
            likely: Chosen::default(),
            room,
            pages: Pages::new(pages),
            texts: BTreeMap::new(),
            begun: 0,
            wanted: Vec::new(),
            alike: Vec::new(),
            ahead: Ahead::default(),
            cuda,
        })
    }

    /// Meets the other ranks.
    pub(super) fn meet(&mut self) -> Result<()> {
        self.state.meet(self.model, &self.cuda, self.room.texts)
    }

    fn held(&self, text: TextId) -> Result<Held> {
        let known = self.texts.get(&text).copied();
        known.ok_or_else(|| Error::invalid("many texts", "a text that has not ended", format!("{text:?}")))
    }

    fn add(&mut self, sequence: Sequence, len: usize) -> TextId {
        let text = TextId(self.begun);
        self.begun += 1;
        self.texts.insert(text, Held { sequence, len });
        text
    }

    /// Writes what the step reads besides weights; returns where it lies, and the rows of the texts that read several tokens. Tokens that
    /// were chosen last lie there already.
    fn place(&mut self, order: &[&Rows<'_>], longest: usize, chosen: bool) -> Result<(Words, Vec<Range<usize>>)> {
        let rows: usize = order.iter().map(|rows| rows.tokens.len()).sum();
        let pages = longest.div_ceil(PAGE_LENGTH);
        if rows > self.room.rows || order.len() > self.room.texts {
            let expected = format!("{:?}", self.room);
            let got = format!("{} texts with {rows} rows", order.len());
            return Err(Error::invalid("many texts", expected, got));
        }
        let words = Words::of(rows, order.len(), pages);
        let (mut chunks, mut first) = (Vec::new(), 0);
        for (i, Rows { text, tokens }) in order.iter().enumerate() {
            let Held { sequence, len } = self.held(*text)?;
            let table = self.pages.of(sequence)?;
            let end = len + tokens.len();
            if end > table.len() * PAGE_LENGTH {
                let expected = format!("pages for {end} positions");
                return Err(Error::invalid("many texts", expected, format!("{} pages", table.len())));
            }
            for (j, (position, &token)) in (len..end).zip(*tokens).enumerate() {
                let slot = table[position / PAGE_LENGTH] as usize * PAGE_LENGTH + position % PAGE_LENGTH;
                self.on_host[words.tokens.start + first + j] = token;
                self.on_host[words.positions.start + first + j] = position as u32;
                self.on_host[words.slots.start + first + j] = slot as u32;
            }
            self.on_host[words.last.start + i] = (end - 1) as u32;
            let used = end.div_ceil(PAGE_LENGTH);
            let to = &mut self.on_host[words.tables.start + i * pages..][..pages];
            to[..used].copy_from_slice(&table[..used]);
            to[used..].fill(0);
            if tokens.len() > 1 {
                chunks.push(first..first + tokens.len());
            }
            first += tokens.len();
        }
        let new = if chosen { words.positions.start } else { 0 }..words.tables.end;
        let (from, to) = (&self.on_host[new.clone()], self.words.view_mut().slice(new));
        let from: &[u8] = bytemuck::cast_slice(from);
        self.uploader.upload(self.cuda.stream(), to.cast(), 1, |range, to| {
            to.copy_from_slice(&from[range]);
            Ok(())
        })?;
        Ok((words, chunks))
    }

    /// Makes what a step of these rows reads lie on the device, or of the tokens that were chosen last: where, the rows of texts that read
    /// several tokens, and positions that no text exceeds.
    fn prepare(&mut self, ordered: &[&Rows<'_>], chosen: bool) -> Result<(Words, Vec<Range<usize>>, usize)> {
        let mut longest = 0;
        for rows in ordered {
            longest = longest.max(self.held(rows.text)?.len + rows.tokens.len());
        }
        if longest > self.room.longest {
            let (expected, got) = (format!("{:?}", self.room), format!("a text of {longest} positions"));
            return Err(Error::invalid("many texts", expected, got));
        }
        let longest = longest.next_power_of_two().max(SHORTEST_RECORDING).min(self.room.longest);
        let (words, chunks) = self.place(ordered, longest, chosen)?;
        self.alike.clear();
        if chunks.is_empty() {
            self.alike.extend(ordered.iter().map(|rows| rows.text));
        }
        self.next.make_room(&self.cuda, ordered.len())?;
        Ok((words, chunks, longest))
    }

    /// Puts a step into the stream: of these rows, or of the tokens that were chosen last.
    fn begin_step(&mut self, ordered: &[&Rows<'_>], chosen: bool) -> Result<()> {
        let (words, chunks, longest) = self.prepare(ordered, chosen)?;
        let Self { model, cuda, recordings, state, next, words: on_device, logits, .. } = self;
        let texts = ordered.len();
        let asks_host = state.asks_host();
        let mut step = || {
            let rows_of_step = words.rows(on_device, longest, &chunks);
            match (texts, chunks.len()) {
                (1, 0) => state.step(model, cuda, rows_of_step),
                _ => state.layers(model, cuda, rows_of_step, false),
            }?;
            state.head(model, cuda, 0..texts, logits)?;
            let of_texts = words.next(on_device, texts);
            next.most_likely(cuda, of_texts, 0, logits.view().slice(0..texts * model.decoder.vocab))
        };
        if chunks.is_empty() && !asks_host { recordings.run(cuda, &(texts, longest), step) } else { step() }?;
        self.likely = self.next.chosen(texts);
        Ok(())
    }

    /// The same, each kernel by itself, timed.
    fn timed(&mut self, ordered: &[&Rows<'_>]) -> Result<Profile> {
        let of_text = |rows: &&Rows<'_>| Ok(self.held(rows.text)?.len).map(|len| len..len + rows.tokens.len());
        let positions = ordered.iter().map(of_text).collect::<Result<Vec<_>>>()?;
        let (words, chunks, longest) = self.prepare(ordered, false)?;
        let Self { model, cuda, state, next, words: on_device, logits, .. } = self;
        let texts = ordered.len();
        let mut timing = Timing::new(model, cuda)?;
        timing.layers(state, words.rows(on_device, longest, &chunks), positions)?;
        timing.head(state, texts, logits)?;
        let of_texts = words.next(on_device, texts);
        let logits = logits.view().slice(0..texts * model.decoder.vocab);
        timing.choice(texts, || next.most_likely(cuda, of_texts, 0, logits))?;
        self.likely = next.chosen(texts);
        timing.profile()
    }

    /// Puts these rows in the order of a step, in which those of the first `wanted` texts have known places.
    fn ordered<'a, 'r>(&mut self, rows: &'a [Rows<'r>], wanted: usize) -> Vec<&'a Rows<'r>> {
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|&i| rows[i].tokens.len() > 1);
        self.wanted = (0..wanted).filter_map(|i| order.iter().position(|&at| at == i)).collect();
        order.iter().map(|&i| &rows[i]).collect()
    }

    /// The texts have read these rows.
    fn grow(&mut self, rows: &[Rows<'_>]) {
        for rows in rows {
            if let Some(held) = self.texts.get_mut(&rows.text) {
                held.len += rows.tokens.len();
            }
        }
    }

    /// Reads the tokens that were chosen last, of all texts of the last step.
    fn begin_ahead(&mut self) -> Result<()> {
        let texts = self.alike.clone();
        // Tokens that only the device knows.
        let rows: Vec<Rows<'_>> = texts.iter().map(|&text| Rows { text, tokens: &[0] }).collect();
        let lens = texts.iter().map(|&text| Ok(self.held(text)?.len)).collect::<Result<Vec<usize>>>()?;
        self.begin_step(&rows.iter().collect::<Vec<_>>(), true)?;
        self.ahead.begun(texts.into_iter().zip(lens));
        Ok(())
    }
}

impl Drop for CudaTexts<'_> {
    fn drop(&mut self) {
        // A step that nobody asked for any more may still run. Whoever comes next hears of an error.
        let _ = self.cuda.stream().synchronize();
    }
}

impl Texts for CudaTexts<'_> {
    fn page_length(&self) -> usize {
        PAGE_LENGTH
    }

    fn pages(&self) -> usize {
        self.pages.budget()
    }

    fn free_pages(&self) -> usize {
        self.pages.free()
    }

    fn pages_of(&self, texts: &[TextId]) -> usize {
        let sequences: Vec<Sequence> = texts.iter().filter_map(|text| Some(self.texts.get(text)?.sequence)).collect();
        self.pages.of_all(&sequences)
    }

    fn begin(&mut self) -> TextId {
        let sequence = self.pages.begin();
        self.add(sequence, 0)
    }

    fn share(&mut self, from: TextId, positions: usize) -> Result<TextId> {
        let Held { sequence, len } = self.held(from)?;
        if positions > len {
            let expected = format!("at most {len} positions, which the other has");
            return Err(Error::invalid("many texts", expected, positions.to_string()));
        }
        let sequence = self.pages.share(sequence, positions.div_ceil(PAGE_LENGTH))?;
        Ok(self.add(sequence, positions))
    }

    fn truncate(&mut self, text: TextId, position: usize) -> Result<()> {
        let Held { sequence, len } = self.held(text)?;
        let len = len.min(position);
        self.pages.keep(sequence, len.div_ceil(PAGE_LENGTH))?;
        self.texts.insert(text, Held { sequence, len });
        Ok(())
    }

    fn end(&mut self, text: TextId) -> Result<()> {
        let Held { sequence, .. } = self.held(text)?;
        self.texts.remove(&text);
        Ok(self.pages.end(sequence)?)
    }

    fn missing_pages(&self, text: TextId, positions: usize) -> usize {
        match self.held(text) {
            Ok(Held { sequence, len }) => self.pages.missing(sequence, len, positions),
            Err(_) => positions.div_ceil(PAGE_LENGTH),
        }
    }

    fn reserve(&mut self, text: TextId, positions: usize) -> Result<()> {
        let Held { sequence, len } = self.held(text)?;
        if let Some(copied) = self.pages.take(sequence, len, positions)? {
            self.state.cache.copy_page(self.cuda.stream(), copied.from as usize, copied.to as usize)?;
        }
        Ok(())
    }

    fn read(&mut self, rows: &[Rows<'_>], wanted: usize) -> Result<()> {
        let read_ahead = rows.iter().map(|rows| self.ahead.place(rows, self.held(rows.text).ok()?.len));
        let places: Option<Vec<usize>> = read_ahead.collect();
        self.ahead.forget();
        if let Some(mut places) = places {
            places.truncate(wanted);
            self.wanted = places;
            self.grow(rows);
            return Ok(());
        }
        let ordered = self.ordered(rows, wanted);
        self.begin_step(&ordered, false)?;
        self.grow(rows);
        Ok(())
    }

    fn profile(&mut self, rows: &[Rows<'_>], wanted: usize) -> Result<Profile> {
        self.ahead.forget();
        let ordered = self.ordered(rows, wanted);
        let profile = self.timed(&ordered)?;
        self.grow(rows);
        Ok(profile)
    }

    fn logits(&mut self, out: &mut Vec<f32>) -> Result<()> {
        let vocab = self.model.decoder.vocab;
        out.resize(self.wanted.len() * vocab, 0.0);
        for (place, out) in self.wanted.iter().zip(out.chunks_exact_mut(vocab)) {
            let of_text = self.logits.view().slice(place * vocab..(place + 1) * vocab);
            self.state.read(&self.cuda, of_text, out)?;
        }
        Ok(())
    }

    fn vectors(&mut self, out: &mut Vec<f32>) -> Result<()> {
        let hidden = self.model.decoder.hidden;
        self.state.wait(&self.cuda)?;
        out.clear();
        for place in &self.wanted {
            let of_text = self.state.normed.view(place * hidden..(place + 1) * hidden);
            match of_text.dtype() {
                Float::F16 => {
                    let mut row = vec![f16::ZERO; hidden];
                    self.cuda.download(of_text, &mut row[..])?;
                    out.extend(row.iter().map(|v| v.to_f32()));
                }
                Float::BF16 => {
                    let mut row = vec![bf16::ZERO; hidden];
                    self.cuda.download(of_text, &mut row[..])?;
                    out.extend(row.iter().map(|v| v.to_f32()));
                }
                Float::F32 => {
                    let mut row = vec![0f32; hidden];
                    self.cuda.download(of_text, &mut row[..])?;
                    out.extend(row);
                }
            }
        }
        Ok(())
    }

    fn choose(&mut self, samplers: &mut [&mut Sampler], ahead: bool) -> Result<Vec<Result<u32>>> {
        let vocab = self.model.decoder.vocab;
        let places: Vec<usize> = self.wanted.iter().copied().take(samplers.len()).collect();
        let texts = places.iter().map(|place| place + 1).max().unwrap_or(0);
        let mut draws = vec![MOST_LIKELY; texts];
        for (&place, sampler) in places.iter().zip(samplers.iter_mut()) {
            if !sampler.needs_logits() {
                draws[place] = draw(sampler);
            }
        }
        let last = if draws.iter().any(|draw| draw.temperature > 0.0) {
            let Self { cuda, next, words, logits, .. } = self;
            let tokens = words.view_mut().slice(0..texts);
            next.draw(cuda, &draws, logits.view().slice(0..texts * vocab), tokens)?
        } else {
            self.likely.clone()
        };
        let in_order = places.iter().copied().eq(0..self.alike.len());
        let on_device = in_order && !samplers.iter().any(|sampler| sampler.needs_logits());
        if ahead && on_device && self.model.comm.size() == 1 && !self.state.asks_host() {
            self.begin_ahead()?;
        }
        let mut tokens: Vec<_> = self.state.tokens(&self.cuda, &self.next, &last)?.into_iter().map(Some).collect();
        let mut chosen = Vec::with_capacity(places.len());
        for (&place, sampler) in places.iter().zip(samplers.iter_mut()) {
            chosen.push(if sampler.needs_logits() {
                let mut of_text = vec![0.0; vocab];
                let all = self.logits.view();
                self.cuda.stream().download(all.slice(place * vocab..(place + 1) * vocab), &mut of_text)?;
                sampler.next(&of_text)
            } else {
                tokens[place].take().unwrap_or(Err(Error::EmptyPrompt))
            });
        }
        self.ahead.chosen(&chosen);
        Ok(chosen)
    }

    fn is_ahead(&self) -> bool {
        self.ahead.is_begun()
    }
}
