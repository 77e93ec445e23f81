//! The decoder's steps, each between two marks of a clock, with what it is, who computes it, and the bytes that it takes.

use super::{Attention, Decoder, Experts, FeedForward, InPlace, ModelDevice, Norm, Slot, Steps};
use crate::error::Result;
use halfbyte::kernel::{Heads, KvType};
use std::ops::{ControlFlow, Range};

/// A step that ran between two marks.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub name: &'static str,
    /// None: outside of the layers.
    pub layer: Option<usize>,
    pub rows: usize,
    pub kernel: String,
    pub bytes: f64,
    pub flop: f64,
}

/// Marks in the work of a device.
pub(crate) trait Clock {
    /// Puts a mark behind what was put into the queue last.
    fn mark(&mut self) -> Result<()>;
}

/// A step that is about to run.
pub(crate) enum What<'a, D: ModelDevice> {
    Embed,
    Norm { norm: &'a Norm<D>, reader: Option<&'a D::Projection> },
    Add,
    Product { by: &'a D::Projection, from: Slot },
    Append(&'a Attention<D>),
    Attend(&'a Attention<D>),
    Activate(&'a FeedForward<D>),
    Experts(&'a Experts<D>),
}

/// What a projection is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Product {
    pub n: usize,
    pub k: usize,
    /// Of its packed weights.
    pub bytes: usize,
}

/// A run that tells what computes its steps.
pub(crate) trait Describe<D: ModelDevice>: Steps<D> {
    /// The kernel of a step of so many rows.
    fn kernel(&self, what: &What<'_, D>, rows: usize) -> Result<String>;

    /// The sizes of a projection.
    fn product(&self, of: &D::Projection) -> Product;

    /// What a projection leaves of a row, where that is what the activation of an MLP makes of outputs.
    fn activated_outputs(&self, _: &D::Projection) -> Option<usize> {
        None
    }

    /// Bytes of an element of the rows that a projection reads behind a norm or an activation; None: behind attention.
    fn input_bytes(&self, reader: Option<&D::Projection>, rows: usize) -> usize;
}

/// Sizes of a model that are the same in all its steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub hidden: usize,
    pub layers: usize,
    /// What keys and values are kept as.
    pub kv: KvType,
    /// Bytes of a row of the embedding.
    pub embedding_row_bytes: usize,
}

impl Sizes {
    /// Of a decoder.
    pub fn of<D: ModelDevice>(decoder: &Decoder<D>, kv: KvType, embedding_row_bytes: usize) -> Self {
        let (hidden, layers) = (decoder.hidden, decoder.layers.len());
        Self { hidden, layers, kv, embedding_row_bytes }
    }
}

/// Bytes of an element of the stream, and of what products leave.
const F32: usize = size_of::<f32>();

/// The steps of a run, timed. Bytes count what a step reads and writes once each, whatever a cache holds.
pub(crate) struct Profiled<'a, 'm, D: ModelDevice, C> {
    run: &'a mut D::Run<'m>,
    clock: &'a mut C,
    sizes: Sizes,
    /// The rows that go on, and the positions that they have in each text.
    rows: usize,
    texts: Vec<Range<usize>>,
    /// Layers that are done, and whether the attention of the next one is.
    done: usize,
    attended: bool,
    steps: Vec<Step>,
}

impl<'a, 'm, D: ModelDevice, C> Profiled<'a, 'm, D, C> {
    /// The steps of the rows that texts have at these positions.
    pub fn new(run: &'a mut D::Run<'m>, clock: &'a mut C, sizes: Sizes, texts: Vec<Range<usize>>) -> Self {
        let rows = texts.iter().map(Range::len).sum();
        Self { run, clock, sizes, rows, texts, done: 0, attended: false, steps: Vec::new() }
    }

    /// What ran, in order: two marks for each.
    pub fn into_steps(self) -> Vec<Step> {
        self.steps
    }
}

impl<'m, D: ModelDevice, C: Clock> Profiled<'_, 'm, D, C>
where
    D::Run<'m>: Describe<D>,
{
    fn timed(
        &mut self,
        name: &'static str,
        what: &What<'_, D>,
        [bytes, flop]: [usize; 2],
        step: impl FnOnce(&mut D::Run<'m>) -> Result<()>,
    ) -> Result<()> {
        let kernel = self.run.kernel(what, self.rows)?;
        self.clock.mark()?;
        step(self.run)?;
        self.clock.mark()?;
        let in_layers = self.done < self.sizes.layers && !matches!(what, What::Embed);
        let layer = in_layers.then_some(self.done);
        let (bytes, flop) = (bytes as f64, flop as f64);
        self.steps.push(Step { name, layer, rows: self.rows, kernel, bytes, flop });
        Ok(())
    }

    /// Positions that the rows of each text see together, and that rows see one by one; of all texts.
    fn positions(&self, window: Option<usize>) -> [usize; 2] {
        let window = window.unwrap_or(usize::MAX);
        let together = |text: &Range<usize>| text.end.min(window.saturating_add(text.len() - 1));
        let seen = self.texts.iter().cloned().flatten().map(|position| window.min(position + 1));
        [self.texts.iter().map(together).sum(), seen.sum()]
    }

    fn feed_forward(&self, mlp: &FeedForward<D>) -> [Product; 2] {
        [&mlp.up, &mlp.down].map(|product| self.run.product(product))
    }
}

impl<'m, D: ModelDevice, C: Clock> Steps<D> for Profiled<'_, 'm, D, C>
where
    D::Run<'m>: Describe<D>,
{
    fn embed(&mut self, vocabulary: &D::Vocabulary) -> Result<()> {
        let bytes = self.rows * (self.sizes.embedding_row_bytes + self.sizes.hidden * F32);
        self.timed("embedding", &What::Embed, [bytes, 0], |run| run.embed(vocabulary))
    }

    fn norm(&mut self, add: bool, norm: &Norm<D>, reader: Option<&D::Projection>) -> Result<()> {
        let name = match (self.attended, self.done == self.sizes.layers) {
            (true, _) => "mlp norm",
            (false, false) => "attention norm",
            (false, true) => "final norm",
        };
        // The stream is read, with an update it is written too, and the update is read.
        let of_element = if add { 3 * F32 } else { F32 } + self.run.input_bytes(reader, self.rows);
        let bytes = self.sizes.hidden * (self.rows * of_element + F32);
        self.timed(name, &What::Norm { norm, reader }, [bytes, 0], |run| run.norm(add, norm, reader))
    }

    fn norm_in_place(&mut self, what: InPlace, norm: &Norm<D>) -> Result<()> {
        let bytes = self.sizes.hidden * F32 * (2 * self.rows + 1);
        // What the MLP has left belongs to its layer, which counts as done.
        let (name, back) = match what {
            InPlace::Stream => ("embedding norm", 0),
            InPlace::Update if self.attended => ("attention post-norm", 0),
            InPlace::Update => ("mlp post-norm", 1),
        };
        self.done -= back;
        let timed =
            self.timed(name, &What::Norm { norm, reader: None }, [bytes, 0], |run| run.norm_in_place(what, norm));
        self.done += back;
        timed
    }

    fn add(&mut self) -> Result<()> {
        let bytes = 3 * F32 * self.rows * self.sizes.hidden;
        self.timed("add", &What::Add, [bytes, 0], Steps::add)
    }

    fn project(&mut self, by: &D::Projection, from: Slot, to: Slot) -> Result<()> {
        let Product { n, k, bytes } = self.run.product(by);
        let name = match (from, to) {
            (_, Slot::Qkv) => "q k v",
            (_, Slot::Up) => "gate, up",
            (Slot::Attended, _) => "o",
            _ => "down",
        };
        let of_input = self.run.input_bytes((from != Slot::Attended).then_some(by), self.rows);
        let of_row = match self.run.activated_outputs(by) {
            Some(width) => width * self.run.input_bytes(None, self.rows),
            None => n * F32,
        };
        let cost = [bytes + self.rows * (k * of_input + of_row), 2 * self.rows * n * k];
        self.timed(name, &What::Product { by, from }, cost, |run| run.project(by, from, to))?;
        match name {
            "o" => self.attended = true,
            "down" => (self.attended, self.done) = (false, self.done + 1),
            _ => {}
        }
        Ok(())
    }

    fn append(&mut self, layer: usize, attention: &Attention<D>) -> Result<()> {
        let Heads { heads, kv_heads, head_size } = attention.heads;
        // Queries and keys are rotated where they lie; keys and values go to the cache.
        let rotated =
            if attention.rope.is_some() || attention.head_norms.is_some() { 2 * (heads + kv_heads) } else { kv_heads };
        let of_row = head_size * (rotated + kv_heads) * F32 + 2 * kv_heads * self.sizes.kv.bytes(head_size);
        let cost = [self.rows * of_row, 0];
        self.timed("rope, append", &What::Append(attention), cost, |run| run.append(layer, attention))
    }

    fn last_rows(&mut self) -> Result<()> {
        self.texts.iter_mut().for_each(|text| text.start = text.end - 1);
        self.rows = self.texts.len();
        self.run.last_rows()
    }

    fn attend(&mut self, layer: usize, attention: &Attention<D>) -> Result<()> {
        let Heads { heads, kv_heads, head_size } = attention.heads;
        let [together, one_by_one] = self.positions(attention.window);
        let rows = self.rows * heads * head_size * (F32 + self.run.input_bytes(None, self.rows));
        let bytes = rows + 2 * together * kv_heads * self.sizes.kv.bytes(head_size);
        let cost = [bytes, 4 * one_by_one * heads * head_size];
        self.timed("attention", &What::Attend(attention), cost, |run| run.attend(layer, attention))
    }

    fn activate(&mut self, mlp: &FeedForward<D>) -> Result<()> {
        if self.run.activated_outputs(&mlp.up).is_some() {
            return self.run.activate(mlp);
        }
        let of_input = self.run.input_bytes(Some(&mlp.down), self.rows);
        let bytes = self.rows * mlp.inner * (F32 * (1 + usize::from(mlp.gated)) + of_input);
        self.timed("activation", &What::Activate(mlp), [bytes, 0], |run| run.activate(mlp))
    }

    fn experts(&mut self, experts: &Experts<D>) -> Result<ControlFlow<()>> {
        let router = self.run.product(&experts.router);
        let all: Vec<[Product; 2]> = experts.experts.iter().map(|mlp| self.feed_forward(mlp)).collect();
        // As many as the rows can choose; experts are of one size.
        let chosen = (self.rows * experts.top_k).min(all.len());
        let weights: usize = all.iter().take(chosen).flatten().map(|product| product.bytes).sum();
        let of_row: usize = all.iter().take(experts.top_k).flatten().map(|product| product.n * product.k).sum();
        let bytes = router.bytes + weights + 2 * F32 * self.rows * self.sizes.hidden;
        let cost = [bytes, 2 * self.rows * (router.n * router.k + of_row)];
        let mut flow = ControlFlow::Continue(());
        self.timed("experts", &What::Experts(experts), cost, |run| {
            flow = run.experts(experts)?;
            Ok(())
        })?;
        (self.attended, self.done) = (false, self.done + 1);
        Ok(flow)
    }
}
