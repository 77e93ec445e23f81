//! Where models lie and compute, and what a text in one is, wherever that is.
//!
//! `cpu` and `cuda` each have the weights on that device, the steps of the decoder, and a text. What they share is said
//! here and there; they do not know each other.

pub mod cpu;
pub(crate) mod cuda;
mod rope;

use crate::error::Result;
use crate::explain::Product;
use crate::profile::Profile;
use crate::sampling::Sampler;
use halfbyte::Float;
use halfbyte::cpu::Cpu;
use halfbyte::cuda::driver::Sent;
use halfbyte::kernel::Reason;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Where a model lies and computes.
#[derive(Clone, Debug, Default)]
pub enum Device {
    /// In memory, with the CPU that a session is given.
    #[default]
    Cpu,
    /// On a GPU.
    Cuda(Gpu),
}

/// A GPU, and how a model computes on it.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// The device.
    pub gpu: Arc<halfbyte::cuda::Gpu>,
    /// Type of what products read, and of the cache of keys and values: f16 as a rule, bf16 where numbers pass 65504, f32
    /// to compare. Everything else is f32.
    pub activations: Float,
    /// Whether what only products with quantised activations read is quantised where it is made, and not by a kernel of its own.
    /// It changes no bit; without it, to compare.
    pub fused: bool,
    /// Whether all layers of a step of one token are one kernel, where the model is one that it takes. Sums are added in another
    /// order than without it, to compare.
    pub persistent: bool,
}

impl Gpu {
    /// Device `index`, with activations in f16. Errors: no driver, one too old, no such device.
    pub fn open(index: u32) -> halfbyte::Result<Self> {
        Ok(Self {
            gpu: Arc::new(halfbyte::cuda::Gpu::open(index)?),
            activations: Float::F16,
            fused: true,
            persistent: true,
        })
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(Gpu { gpu, activations, .. }) => {
                write!(f, "cuda:{} ({}), activations {activations}", gpu.context().info().index, gpu.name())
            }
        }
    }
}

/// Where the time went that weights took to a GPU.
#[derive(Clone, Copy, Debug)]
pub struct LoadTimes {
    /// All of it.
    pub weights: Duration,
    /// Threads that read, each for some layers, with all others to copy for them.
    pub lanes: usize,
    /// What went over the bus, and what these threads did meanwhile.
    pub sent: Sent,
    /// Of a thread that loaded kernels beside.
    pub kernels: Duration,
}

/// A model's weights where they lie and compute.
pub(crate) trait Resident: std::fmt::Debug + Send + Sync {
    /// Begins a text with room for `context` tokens; `cpu` computes if the weights lie there.
    fn begin<'m>(&'m self, cpu: &'m Cpu, context: usize) -> Result<Box<dyn Text + 'm>>;

    /// Tokens of one text that go through the layers together: enough for the products to run at full speed.
    fn prefill_tokens(&self) -> usize {
        512
    }

    /// Makes room for texts that go through the layers together; `cpu` computes if the weights lie there.
    fn begin_many<'m>(&'m self, cpu: &'m Cpu, room: Room) -> Result<Box<dyn Texts + 'm>>;

    /// Makes everything ready that is otherwise made when it is first needed; `progress` is told how much of how much is
    /// done, from any thread.
    fn prepare(&self, progress: &(dyn Fn(usize, usize) + Sync)) -> Result<()>;

    /// What its quantised products are computed by; `cpu` computes if the weights lie there.
    fn explain(&self, cpu: &Cpu) -> Result<Vec<Product>>;

    /// What a kernel of all layers would need, where there is one for other models and a step of one token goes kernel by kernel.
    fn one_kernel_needs(&self) -> Option<&Reason> {
        None
    }

    /// Where the time went that loading took; None in memory.
    fn load_times(&self) -> Option<LoadTimes> {
        None
    }

    /// Bytes of all weights, as they lie in memory.
    fn bytes(&self) -> usize;

    /// Bytes of weights that a step of so many tokens reads: all but other rows of the embedding, where that is not the head, and the
    /// experts that do not compute, where each token chooses them by chance.
    fn bytes_of_step(&self, tokens: usize) -> usize;

    /// Bytes that keys and values of one token take over all layers.
    fn kv_bytes_per_token(&self) -> usize;
}

/// One text in a model where that computes: what it has read, and what comes next.
pub(crate) trait Text: std::fmt::Debug + Send {
    /// Tokens it has room for.
    fn capacity(&self) -> usize;

    /// Tokens read so far: the position of the next.
    fn position(&self) -> usize;

    /// Forgets tokens from a position on.
    fn truncate(&mut self, position: usize) -> Result<()>;

    /// Reads some tokens, at most as many as go through the layers together.
    ///
    /// The caller has checked that ids are below the vocabulary and that there is room. After an error nothing of the batch
    /// has been read, or it must be forgotten by [`Text::truncate`].
    fn read(&mut self, batch: Batch<'_>) -> Result<()>;

    /// Reads tokens as [`Text::read`] does and chooses the most likely one to follow, each step timed.
    fn profile(&mut self, tokens: &[u32]) -> Result<Profile>;

    /// Logits `[rows, vocab]` of some rows of the batch read last: of the last token there is only row 0, unless all were
    /// asked for.
    fn logits(&mut self, rows: Range<usize>, out: &mut [f32]) -> Result<()>;

    /// The token that a sampler chooses to follow what was read. `goes_on`: the caller expects to read it next, so that a device may begin
    /// before it is known; then neither logits nor another token are asked for until something is read or forgotten. Error: as
    /// [`Sampler::next`].
    fn next(&mut self, sampler: &mut Sampler, goes_on: bool) -> Result<u32>;
}

/// What many texts need room for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// Positions of keys and values of all texts together; rounded up to whole pages.
    pub positions: usize,
    /// Positions that one text may have.
    pub longest: usize,
    /// Texts that go through the layers together.
    pub texts: usize,
    /// Rows of all of them.
    pub rows: usize,
}

/// The name of a text among [`Texts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TextId(pub u64);

/// The tokens that come next in a text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    pub text: TextId,
    pub tokens: &'a [u32],
}

/// Texts that go through a model's layers together, with their keys and values in pages of a fixed budget.
pub(crate) trait Texts: std::fmt::Debug + Send {
    /// Positions of a page.
    fn page_length(&self) -> usize;

    /// Pages in all.
    fn pages(&self) -> usize;

    /// Pages that no text has.
    fn free_pages(&self) -> usize;

    /// Pages that these texts have together, one that several have counted once.
    fn pages_of(&self, texts: &[TextId]) -> usize;

    /// A new text, without positions.
    fn begin(&mut self) -> TextId;

    /// A new text that has the first positions of another, in the same pages. Error: the other has not so many.
    fn share(&mut self, from: TextId, positions: usize) -> Result<TextId>;

    /// Forgets positions from one on.
    fn truncate(&mut self, text: TextId, position: usize) -> Result<()>;

    /// Forgets a text; pages that no other has are free.
    fn end(&mut self, text: TextId) -> Result<()>;

    /// Pages that [`Texts::reserve`] would take.
    fn missing_pages(&self, text: TextId, positions: usize) -> usize;

    /// Takes the pages for positions below this one. Error: there are not so many.
    fn reserve(&mut self, text: TextId, positions: usize) -> Result<()>;

    /// Reads the tokens of all texts, for which pages are reserved; what follows the first `wanted` of them can be chosen then. After an
    /// error none of these texts can go on.
    fn read(&mut self, rows: &[Rows<'_>], wanted: usize) -> Result<()>;

    /// Reads tokens as [`Texts::read`] does and chooses the most likely ones to follow, each step timed. What was read ahead is read again.
    fn profile(&mut self, rows: &[Rows<'_>], wanted: usize) -> Result<Profile>;

    /// Logits `[wanted, vocab]` after the last token of each of these texts.
    fn logits(&mut self, out: &mut Vec<f32>) -> Result<()>;

    /// Vectors `[wanted, hidden]` after the last token of each of these texts, behind the last norm.
    fn vectors(&mut self, out: &mut Vec<f32>) -> Result<()>;

    /// The tokens that samplers choose to follow the first texts that were read last, a sampler each; of each the error that
    /// [`Sampler::next`] has. `ahead`: these texts are all that were read, and pages are reserved for one more token of each; a device may
    /// then begin to read what it chose before anybody knows it.
    fn choose(&mut self, samplers: &mut [&mut Sampler], ahead: bool) -> Result<Vec<Result<u32>>>;

    /// Whether the tokens that were chosen last are being read: [`Texts::read`] of them, or of some, has little left to do; of others it
    /// begins anew.
    fn is_ahead(&self) -> bool {
        false
    }
}

/// Tokens of a text that go through the layers together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch<'a> {
    /// Their ids, one after the other.
    pub tokens: &'a [u32],
    /// Whether every token's vector is wanted, or the last one's only.
    pub all_rows: bool,
}

/// The first `len` elements of a buffer, which grows where it is shorter.
pub(crate) fn room(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}
