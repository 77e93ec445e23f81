//! Rows on their way through the layers, on a CPU.

use super::{OnCpu, Projection, Vocabulary};
use crate::arch::spec::{GateClamp, NormKind};
use crate::comm::Comm;
use crate::decoder::{Attention, Experts, FeedForward, InPlace, Norm, Slot, Steps};
use crate::device::room;
use crate::error::Result;
use halfbyte::cpu::Cpu;
use halfbyte::cpu::attention::{self, KvCache, Sequence, attention};
use halfbyte::cpu::nn;
use halfbyte::kernel::{Activation, Heads};
use std::fmt;
use std::mem::take;
use std::ops::{ControlFlow, Range};

/// Sees the inputs of a group of linear layers.
pub(crate) type Tap<'a> = dyn FnMut(usize, &[f32]) -> Result<ControlFlow<()>> + 'a;

/// The rows of a text that go through the layers together with those of other texts.
#[derive(Clone, Debug)]
struct Rows {
    /// Its keys and values.
    sequence: Sequence,
    /// Position of the first row.
    position: usize,
    rows: Range<usize>,
}

/// What a run works on, which lasts from one to the next: buffers that grow to the largest batch seen, keys and values.
#[derive(Debug)]
pub(crate) struct State {
    hidden: usize,
    /// Of this rank.
    heads: Heads,
    pub cache: KvCache,
    /// Tokens that its text has room for; of many texts 0: short ones.
    pub room: usize,
    /// The tokens that go through the layers together.
    tokens: Vec<u32>,
    /// Whose they are.
    texts: Vec<Rows>,
    /// Rows.
    m: usize,
    /// The residual stream `[m, hidden]`.
    stream: Vec<f32>,
    /// One for each [`Slot`].
    slots: [Vec<f32>; 6],
    /// For projections that could not be joined.
    part: Vec<f32>,
}

impl State {
    pub fn new(hidden: usize, heads: Heads, cache: KvCache) -> Self {
        Self {
            hidden,
            heads,
            cache,
            room: 0,
            tokens: Vec::new(),
            texts: Vec::new(),
            m: 0,
            stream: Vec::new(),
            slots: Default::default(),
            part: Vec::new(),
        }
    }

    /// Tokens that come next in some texts.
    pub fn begin(&mut self, texts: &[(Sequence, &[u32])]) {
        self.tokens.clear();
        self.texts.clear();
        for &(sequence, tokens) in texts {
            let first = self.tokens.len();
            self.tokens.extend_from_slice(tokens);
            let (position, rows) = (self.cache.len(sequence), first..self.tokens.len());
            self.texts.push(Rows { sequence, position, rows });
        }
        self.m = self.tokens.len();
    }

    /// Those of one text by their vectors.
    pub fn begin_with(&mut self, sequence: Sequence, stream: &[f32]) {
        self.m = stream.len() / self.hidden;
        self.room = self.m;
        room(&mut self.stream, stream.len()).copy_from_slice(stream);
        self.texts.clear();
        self.texts.push(Rows { sequence, position: self.cache.len(sequence), rows: 0..self.m });
    }

    /// Rows that have come through.
    pub fn rows(&self) -> usize {
        self.m
    }

    /// Normed vectors of some rows.
    pub fn normed(&self, rows: &Range<usize>) -> &[f32] {
        &self.slots[Slot::Normed as usize][rows.start * self.hidden..rows.end * self.hidden]
    }

    /// The stream, to which [`State::update`] is not added yet.
    pub fn stream(&self) -> &[f32] {
        &self.stream[..self.m * self.hidden]
    }

    /// What the last step adds to the stream.
    pub fn update(&self) -> &[f32] {
        &self.slots[Slot::Update as usize][..self.m * self.hidden]
    }

    fn slot(&mut self, slot: Slot) -> &mut Vec<f32> {
        &mut self.slots[slot as usize]
    }
}

/// A run: the CPU, the ranks, and what it works on.
pub(crate) struct Run<'m> {
    pub cpu: &'m Cpu,
    pub comm: &'m dyn Comm,
    pub state: &'m mut State,
    /// Calibration's eyes.
    pub tap: Option<&'m mut Tap<'m>>,
}

impl fmt::Debug for Run<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Steps<OnCpu> for Run<'_> {
    fn embed(&mut self, vocabulary: &Vocabulary) -> Result<()> {
        let State { hidden, tokens, stream, .. } = &mut *self.state;
        vocabulary.embed(self.comm, tokens, room(stream, tokens.len() * *hidden))
    }

    fn norm(&mut self, add: bool, norm: &Norm<OnCpu>, _: Option<&Projection>) -> Result<()> {
        let len = self.state.m * self.state.hidden;
        let mut normed = take(self.state.slot(Slot::Normed));
        let mut update = take(self.state.slot(Slot::Update));
        let (stream, out) = (room(&mut self.state.stream, len), room(&mut normed, len));
        if add {
            self.comm.all_reduce(room(&mut update, len))?;
        }
        let Norm { kind, eps, weight, bias } = norm;
        let (cpu, update_of) = (self.cpu, add.then(|| &update[..len]));
        match (kind, update_of, bias) {
            (NormKind::Rms, None, _) => nn::rms_norm(cpu, stream, weight, *eps, out)?,
            (NormKind::Rms, Some(update), _) => nn::add_rms_norm(cpu, stream, update, weight, *eps, out)?,
            (NormKind::Layer, None, bias) => nn::layer_norm(cpu, stream, weight, bias.as_deref(), *eps, out)?,
            (NormKind::Layer, Some(update), bias) => {
                nn::add_layer_norm(cpu, stream, update, weight, bias.as_deref(), *eps, out)?;
            }
        }
        (*self.state.slot(Slot::Normed), *self.state.slot(Slot::Update)) = (normed, update);
        Ok(())
    }

    fn norm_in_place(&mut self, what: InPlace, norm: &Norm<OnCpu>) -> Result<()> {
        let len = self.state.m * self.state.hidden;
        let mut normed = take(self.state.slot(Slot::Normed));
        let x = match what {
            InPlace::Stream => &mut self.state.stream,
            InPlace::Update => self.state.slot(Slot::Update),
        };
        let mut before = take(x);
        if what == InPlace::Update {
            self.comm.all_reduce(room(&mut before, len))?;
        }
        let (from, to) = (room(&mut before, len), room(&mut normed, len));
        match (norm.kind, &norm.bias) {
            (NormKind::Rms, _) => nn::rms_norm(self.cpu, from, &norm.weight, norm.eps, to)?,
            (NormKind::Layer, bias) => nn::layer_norm(self.cpu, from, &norm.weight, bias.as_deref(), norm.eps, to)?,
        }
        // Every rank has all of it now, and the next sum over ranks wants it once.
        if what == InPlace::Update && self.comm.rank() > 0 {
            to.fill(0.0);
        }
        let x = match what {
            InPlace::Stream => &mut self.state.stream,
            InPlace::Update => self.state.slot(Slot::Update),
        };
        *x = normed;
        *self.state.slot(Slot::Normed) = before;
        Ok(())
    }

    fn add(&mut self) -> Result<()> {
        let len = self.state.m * self.state.hidden;
        let mut update = take(self.state.slot(Slot::Update));
        self.comm.all_reduce(room(&mut update, len))?;
        nn::add(self.cpu, room(&mut self.state.stream, len), &update[..len])?;
        *self.state.slot(Slot::Update) = update;
        Ok(())
    }

    fn project(&mut self, by: &Projection, from: Slot, to: Slot) -> Result<()> {
        let (cpu, m) = (self.cpu, self.state.m);
        let (mut x, mut y) = (take(self.state.slot(from)), take(self.state.slot(to)));
        let part = &mut self.state.part;
        let done = by.forward(cpu, room(&mut x, m * by.k()), m, room(&mut y, m * by.n()), part);
        (*self.state.slot(from), *self.state.slot(to)) = (x, y);
        done
    }

    fn append(&mut self, layer: usize, attention: &Attention<OnCpu>) -> Result<()> {
        let (cpu, heads) = (self.cpu, attention.heads);
        let State { cache, room: of_text, slots, texts, m, .. } = &mut *self.state;
        let qkv = room(&mut slots[Slot::Qkv as usize], *m * heads.row());
        if let Some([q, k]) = &attention.head_norms {
            nn::head_rms_norm(cpu, qkv, heads, &q.weight, &k.weight, q.eps)?;
        }
        for Rows { sequence, position, rows } in texts {
            let qkv = &mut qkv[rows.start * heads.row()..rows.end * heads.row()];
            if let Some(rope) = &attention.rope {
                rope.of(*of_text).apply(cpu, qkv, heads, *position)?;
            }
            cache.append(cpu, *sequence, layer, *position, qkv)?;
        }
        Ok(())
    }

    fn last_rows(&mut self) -> Result<()> {
        let State { hidden, heads, stream, slots, texts, m, .. } = &mut *self.state;
        for (to, text) in texts.iter_mut().enumerate() {
            let last = text.rows.end - 1;
            let narrow = |buffer: &mut Vec<f32>, width: usize| {
                buffer.copy_within(last * width..(last + 1) * width, to * width);
            };
            narrow(stream, *hidden);
            narrow(&mut slots[Slot::Normed as usize], *hidden);
            narrow(&mut slots[Slot::Qkv as usize], heads.row());
            (text.position, text.rows) = (text.position + last - text.rows.start, to..to + 1);
        }
        *m = texts.len();
        Ok(())
    }

    fn attend(&mut self, layer: usize, of: &Attention<OnCpu>) -> Result<()> {
        let (heads, width) = (of.heads, of.heads.heads * of.heads.head_size);
        let mut attended = take(self.state.slot(Slot::Attended));
        let State { cache, slots, texts, m, .. } = &mut *self.state;
        let out = room(&mut attended, *m * width);
        for Rows { sequence, position, rows } in texts {
            let what = attention::Attention {
                qkv: &slots[Slot::Qkv as usize][rows.start * heads.row()..rows.end * heads.row()],
                heads,
                first_position: *position,
                scale: of.scale,
                window: of.window,
                alibi: of.alibi.as_deref(),
                cap: of.cap,
                sinks: of.sinks.as_deref(),
            };
            attention(self.cpu, &what, cache, *sequence, layer, &mut out[rows.start * width..rows.end * width])?;
        }
        *self.state.slot(Slot::Attended) = attended;
        Ok(())
    }

    fn activate(&mut self, mlp: &FeedForward<OnCpu>) -> Result<()> {
        let (m, inner) = (self.state.m, mlp.inner);
        let mut out = take(self.state.slot(Slot::Inner));
        let up = room(self.state.slot(Slot::Up), m * inner * (1 + usize::from(mlp.gated)));
        activate(self.cpu, mlp, up, room(&mut out, m * inner))?;
        *self.state.slot(Slot::Inner) = out;
        Ok(())
    }

    fn experts(&mut self, experts: &Experts<OnCpu>) -> Result<ControlFlow<()>> {
        let mut update = take(self.state.slot(Slot::Update));
        let Self { cpu, state, tap, .. } = self;
        let State { hidden, m, slots, part, .. } = &mut **state;
        let (m, len) = (*m, *m * *hidden);
        let normed = &slots[Slot::Normed as usize][..len];
        let mut see = |group: usize, x: &[f32]| match tap {
            None => Ok(ControlFlow::Continue(())),
            Some(tap) => tap(group, x),
        };
        let flow = super::experts::forward(cpu, experts, normed, m, room(&mut update, len), part, &mut see)?;
        *self.state.slot(Slot::Update) = update;
        Ok(flow)
    }

    fn reads(&mut self, group: usize, slot: Slot, by: &Projection) -> Result<ControlFlow<()>> {
        match &mut self.tap {
            None => Ok(ControlFlow::Continue(())),
            Some(tap) => tap(group, &self.state.slots[slot as usize][..self.state.m * by.k()]),
        }
    }
}

/// The activation of an MLP. Shapes: up `[m, 2 · inner]` with a gate first, or `[m, inner]`, out `[m, inner]`.
pub(super) fn activate(cpu: &Cpu, mlp: &FeedForward<OnCpu>, up: &[f32], out: &mut [f32]) -> Result<()> {
    let (inner, f) = (mlp.inner, mlp.activation);
    if let Some(GateClamp { alpha, limit }) = mlp.clamp {
        return Ok(nn::clamped_swiglu(cpu, up, inner, (alpha, limit), out)?);
    }
    match (mlp.gated, f) {
        (true, Activation::Silu) => nn::swiglu(cpu, up, inner, out)?,
        (true, Activation::Gelu) => nn::geglu(cpu, up, inner, out)?,
        (true, Activation::GeluTanh) => nn::geglu_tanh(cpu, up, inner, out)?,
        (true, f) => {
            for (row, out) in up.chunks_exact(2 * inner).zip(out.chunks_exact_mut(inner)) {
                let (gate, up) = row.split_at(inner);
                out.iter_mut().zip(gate).zip(up).for_each(|((out, gate), up)| *out = f.apply(*gate) * up);
            }
        }
        (false, f) => {
            out.copy_from_slice(up);
            match f {
                Activation::Gelu => nn::gelu(cpu, out),
                Activation::GeluTanh => nn::gelu_tanh(cpu, out),
                f => out.iter_mut().for_each(|v| *v = f.apply(*v)),
            }
        }
    }
    Ok(())
}
