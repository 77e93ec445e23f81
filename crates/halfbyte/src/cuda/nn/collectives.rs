//! Launches of `collectives.cu`: what ranks on GPUs of one host tell each other, by memory that they write into.

mod shots;

use super::{launch, narrow, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Buffer, FloatViewMut, HostWords, Inbox, Peer, Stream, View, ViewMut};
use crate::cuda::nccl::Nccl;
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};
use shots::{FIRST, IN_NORM, MOST_RANKS, ONE_SHOT, SECOND, capacity, launches, rows_of};
use std::ops::Range;

static SOURCE: Source = Source {
    path: "nn/collectives.cu",
    text: include_str!("collectives.cu"),
    parameters: &[Ranks::LAYOUT, ReduceParams::LAYOUT, GatherParams::LAYOUT],
};

const OP: &str = "ranks on GPUs";

const THREADS: usize = 256;
/// Blocks of a launch at most, of one rank and of all together, since ranks may share a GPU; in two shots more are faster.
const BLOCKS: usize = 64;
const BLOCKS_OF_ALL: usize = 256;

/// Slots of an inbox.
const SLOTS: usize = 2;
/// The word of `RankState` in the source that says who was silent.
const FAILED: u64 = 2;

pub(super) fn instances() -> [Instance; 3] {
    ["all_reduce", "in_shots", "all_gather"].map(|kernel| Instance::new(&SOURCE, kernel))
}

parameters! {
    /// As in `ranks.cuh`.
    pub(super) struct Ranks {
        inboxes: [u64; MOST_RANKS],
        state: u64,
        silent: u64,
        capacity: u64,
        rank: u32,
        size: u32,
        own_gpu: u32,
        padding: u32,
    }

    /// As in the source.
    struct ReduceParams {
        ranks: Ranks,
        values: u64,
        into: u64,
        elements: u64,
        part: u64,
        begin: u64,
        most: u64,
        shots: u32,
        aligned: u32,
    }

    /// As in the source.
    struct GatherParams {
        ranks: Ranks,
        own: u64,
        all: u64,
        rows: u64,
        firsts: [u32; MOST_RANKS + 1],
        padding: u32,
    }
}

/// What a norm adds to the residual stream first.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// `[m, d]`.
    pub values: View<'a, f32>,
    /// Those whose values are added up before, in the same launch: where [`Collectives::sums_in_norm`] says so.
    pub ranks: Option<&'a Collectives>,
}

impl<'a> From<View<'a, f32>> for Update<'a> {
    fn from(values: View<'a, f32>) -> Self {
        Self { values, ranks: None }
    }
}

impl Update<'_> {
    /// Error: another length than m rows, ranks that a norm of so many does not add up by itself.
    pub(super) fn checked(&self, op: &'static str, [m, length]: [usize; 2]) -> Result<()> {
        same_length(op, "update", m.checked_mul(length), self.values.len())?;
        match self.ranks {
            Some(ranks) if !ranks.sums_in_norm(m, length) => {
                Err(Error::invalid(op, "rows that ranks add up in one launch", format!("{m} of {length} elements")))
            }
            _ => Ok(()),
        }
    }
}

/// This rank's end: the memory that the others write into, before they know it.
#[derive(Debug)]
pub struct Mailbox {
    inbox: Inbox,
    size: usize,
}

impl Mailbox {
    /// Among so many ranks. Errors: more than 16, memory is short.
    pub fn new(gpu: &Gpu, stream: &Stream, size: usize) -> Result<Self> {
        if !(1..=MOST_RANKS).contains(&size) {
            return Err(Error::invalid(OP, format!("1 to {MOST_RANKS} ranks"), size.to_string()));
        }
        let inbox = Inbox::new(gpu.context(), stream, SLOTS * size * capacity(size))?;
        // Others write as soon as they know where.
        stream.synchronize()?;
        Ok(Self { inbox, size })
    }

    /// What the other ranks are told of it. Error: the system lets no other process open it.
    pub fn address(&self, gpu: &Gpu) -> Result<Vec<u8>> {
        self.inbox.address(gpu.context())
    }
}

/// Ranks on GPUs. Every rank makes the same calls in the same order, all in one stream, or in several that wait for each other.
///
/// Ranks of one host, each a process or a thread, write into each other's memory ([`Collectives::new`]). Where they are threads of one
/// process and share a device, what waits there must leave room for what it waits for, and nothing may wait for that whole device between
/// their calls, as freeing memory does. Processes take turns. Ranks that do not reach each other's memory have NCCL
/// ([`Collectives::by_nccl`]).
#[derive(Debug)]
pub struct Collectives {
    rank: usize,
    size: usize,
    way: Way,
}

#[derive(Debug)]
enum Way {
    Memory(Memory),
    Nccl(Nccl),
}

/// Inboxes that ranks write into.
#[derive(Debug)]
struct Memory {
    mailbox: Mailbox,
    peers: Vec<Option<Peer>>,
    /// No other thread of this process is a rank on this one's GPU. Processes that share one take turns.
    own_gpu: bool,
    state: Buffer<u32>,
    silent: HostWords,
}

impl Collectives {
    /// By what every rank said of its mailbox, in the order of ranks. Errors: addresses of another number of ranks, a rank on another
    /// host, or on a device that this one does not reach.
    pub fn new(gpu: &Gpu, stream: &Stream, mailbox: Mailbox, rank: usize, addresses: &[Vec<u8>]) -> Result<Self> {
        if addresses.len() != mailbox.size || rank >= mailbox.size {
            let expected = format!("the addresses of {} ranks, this one among them", mailbox.size);
            return Err(Error::invalid(OP, expected, format!("{} of rank {rank}", addresses.len())));
        }
        let (context, peers) = (gpu.context(), opened(gpu, rank, addresses)?);
        let own_gpu = !shared(gpu, &peers);
        let mut state = context.allocate(4)?;
        stream.fill(state.view_mut(), 0)?;
        let (size, silent) = (mailbox.size, HostWords::new(context, 1, 0)?);
        Ok(Self { rank, size, way: Way::Memory(Memory { mailbox, peers, own_gpu, state, silent }) })
    }

    /// By NCCL. Sums are formed in its order.
    pub fn by_nccl(nccl: Nccl) -> Self {
        Self { rank: nccl.rank(), size: nccl.size(), way: Way::Nccl(nccl) }
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// NCCL, where ranks do not reach each other's memory: what waits for a rank that has ended does so until it is aborted.
    pub fn nccl(&self) -> Option<&Nccl> {
        match &self.way {
            Way::Memory(_) => None,
            Way::Nccl(nccl) => Some(nccl),
        }
    }

    /// Whether a norm can add up so many rows by itself: they go in one launch, from memory that ranks write into.
    pub fn sums_in_norm(&self, m: usize, length: usize) -> bool {
        let elements = length.checked_next_multiple_of(4).and_then(|row| row.checked_mul(m));
        self.nccl().is_none() && elements.is_some_and(|elements| elements <= IN_NORM)
    }

    /// Adds up the ranks' values, element by element and in the order of ranks, so that all get the same bits. *Errors:* none but the
    /// device's; a rank that is silent for 8 s is told by [`Collectives::heard`].
    pub fn all_reduce(&self, gpu: &Gpu, stream: &Stream, values: ViewMut<'_, f32>) -> Result<()> {
        match &self.way {
            Way::Memory(memory) => self.reduce(gpu, stream, memory, values, None),
            Way::Nccl(nccl) => nccl.all_reduce(stream, values),
        }
    }

    /// Adds what [`Collectives::all_reduce`] would leave to other values; this rank's are undefined then.
    ///
    /// *Shapes:* `values` and `into` have as many elements, on all ranks. *Errors:* lengths that are not equal; a rank that is silent for
    /// 8 s is told by [`Collectives::heard`].
    pub fn all_reduce_into(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        mut values: ViewMut<'_, f32>,
        into: ViewMut<'_, f32>,
    ) -> Result<()> {
        same_length(OP, "sums", Some(into.len()), values.len())?;
        match &self.way {
            Way::Memory(memory) => self.reduce(gpu, stream, memory, values, Some(into)),
            Way::Nccl(nccl) => {
                nccl.all_reduce(stream, values.reborrow())?;
                super::add_to(gpu, stream, into, values.view())
            }
        }
    }

    fn reduce(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        memory: &Memory,
        values: ViewMut<'_, f32>,
        into: Option<ViewMut<'_, f32>>,
    ) -> Result<()> {
        let elements = values.len();
        let into = into.map_or(0, |into| into.pointer());
        if elements > ONE_SHOT {
            let part = elements.div_ceil(4 * self.size) * 4;
            return self.in_shots(gpu, stream, memory, [values.pointer(), into], [elements, part], FIRST | SECOND);
        }
        let values = values.pointer();
        let params = ReduceParams {
            values,
            into,
            elements: elements as u64,
            aligned: are_aligned([values, into], elements).into(),
            ranks: memory.params(self.rank),
            ..Zeroable::zeroed()
        };
        if elements == 0 { Ok(()) } else { put(gpu, stream, 0, [elements, BLOCKS], &params) }
    }

    /// In as many launches as an inbox needs. Each rank has a part of the elements, and hears of every other in each launch: the last one's
    /// part, which may be shorter, must not end before the last launch.
    fn in_shots(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        memory: &Memory,
        [values, into]: [u64; 2],
        [elements, part]: [usize; 2],
        shots: u32,
    ) -> Result<()> {
        let (_, most) = launches(part, self.size, shots);
        let blocks = BLOCKS.max(BLOCKS_OF_ALL / self.size);
        for begin in (0..part).step_by(most) {
            let params = ReduceParams {
                ranks: memory.params(self.rank),
                values,
                into,
                elements: elements as u64,
                part: part as u64,
                begin: begin as u64,
                most: most as u64,
                shots,
                aligned: are_aligned([values, into], elements).into(),
            };
            put(gpu, stream, 1, [most, blocks], &params)?;
        }
        Ok(())
    }

    /// The rows of m whose sums this rank forms, and norms for all, where that takes less than sums of all rows on every rank. None: few
    /// rows, rows of other than a multiple of 8 elements, NCCL.
    pub fn own_rows(&self, m: usize, length: usize) -> Option<Range<usize>> {
        self.nccl().is_none().then(|| rows_of(self.rank, self.size, [m, length])).flatten()
    }

    /// Adds up the ranks' values of this rank's rows ([`Collectives::own_rows`]), and adds that to these rows. *Shapes:* both `[m, length]`.
    /// *Errors:* other lengths, rows that are not divided.
    pub fn reduce_scatter_into(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        values: View<'_, f32>,
        into: ViewMut<'_, f32>,
        shape: [usize; 2],
    ) -> Result<()> {
        let (memory, part) = self.divided(shape)?;
        let elements = shape[0] * shape[1];
        same_length(OP, "values", Some(elements), values.len())?;
        same_length(OP, "sums", Some(elements), into.len())?;
        self.in_shots(gpu, stream, memory, [values.pointer(), into.pointer()], [elements, part], FIRST)
    }

    /// Gives every rank the rows of all others ([`Collectives::own_rows`]). *Shape:* `[m, length]`. *Errors:* another length, rows that are
    /// not divided.
    pub fn all_gather_rows(&self, gpu: &Gpu, stream: &Stream, rows: FloatViewMut<'_>, shape: [usize; 2]) -> Result<()> {
        let (memory, part) = self.divided(shape)?;
        same_length(OP, "rows", Some(shape[0] * shape[1]), rows.len())?;
        // Words of four bytes, whatever they are.
        let words = |elements: usize| elements * rows.dtype().size_bytes() / size_of::<f32>();
        let sizes = [words(shape[0] * shape[1]), words(part)];
        self.in_shots(gpu, stream, memory, [rows.pointer(), 0], sizes, SECOND)
    }

    /// Elements of a rank's rows.
    fn divided(&self, [m, length]: [usize; 2]) -> Result<(&Memory, usize)> {
        match &self.way {
            Way::Memory(memory) if self.own_rows(m, length).is_some() => Ok((memory, m.div_ceil(self.size) * length)),
            _ => Err(Error::invalid(OP, "rows that ranks divide", format!("{m} of {length} elements"))),
        }
    }

    /// Lays the ranks' columns side by side. *Shapes:* own `[m, widths[rank]]`, all `[m, sum of widths]`. *Errors:* lengths that do not
    /// fit, a rank without columns or with more than 2²⁰; and as [`Collectives::all_reduce`].
    pub fn all_gather(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        own: View<'_, f32>,
        widths: &[usize],
        all: ViewMut<'_, f32>,
    ) -> Result<()> {
        if widths.len() != self.size() {
            let expected = format!("the widths of {} ranks", self.size());
            return Err(Error::invalid(OP, expected, format!("{} widths", widths.len())));
        }
        let (widest, width, row) = (widths.iter().max().copied().unwrap_or(0), widths[self.rank], widths.iter().sum());
        let m = super::rows_of(OP, all.len(), row)?;
        same_length(OP, "own", m.checked_mul(width), own.len())?;
        // Who hears nothing of a rank in a call does not know that it has ended the one before.
        if widest > IN_NORM || widths.contains(&0) {
            let expected = format!("1 to {IN_NORM} columns of each rank");
            return Err(Error::invalid(OP, expected, format!("{widths:?}")));
        }
        let memory = match &self.way {
            Way::Memory(memory) => memory,
            Way::Nccl(nccl) => return nccl.all_gather(stream, own, widths, all),
        };
        let mut firsts = [0; MOST_RANKS + 1];
        for (i, width) in widths.iter().enumerate() {
            firsts[i + 1] = narrow(OP, "columns", firsts[i] as usize + width)?;
        }
        let at_a_time = capacity(self.size) / widest.max(1);
        let mut rest = all;
        for first in (0..m).step_by(at_a_time) {
            let rows = at_a_time.min(m - first);
            let (all, others) = rest.split_at(rows * row);
            let params = GatherParams {
                ranks: memory.params(self.rank),
                own: own.slice(first * width..(first + rows) * width).pointer(),
                all: all.pointer(),
                rows: rows as u64,
                firsts,
                padding: 0,
            };
            put(gpu, stream, 2, [rows * widest, BLOCKS], &params)?;
            rest = others;
        }
        Ok(())
    }

    /// Whether all ranks were heard of in what the device has done so far. Error: the first that was silent.
    pub fn heard(&self) -> std::result::Result<(), usize> {
        match &self.way {
            Way::Memory(memory) => match memory.silent.get(0) {
                0 => Ok(()),
                silent => Err(silent as usize - 1),
            },
            // What NCCL has not done is waited for, by the host.
            Way::Nccl(_) => Ok(()),
        }
    }

    /// The others' places in other memory, by what every rank said of its own, for kernels that run side by side. Errors: as
    /// [`Collectives::new`]; ranks that NCCL connects, or that share a device in one process, where kernels do not run so.
    pub fn neighbours(&self, gpu: &Gpu, addresses: &[Vec<u8>]) -> Result<Neighbours> {
        let Way::Memory(memory) = &self.way else {
            return Err(Error::invalid(OP, "memory that ranks write into", "NCCL"));
        };
        same_length(OP, "addresses", Some(self.size), addresses.len())?;
        let peers = opened(gpu, self.rank, addresses)?;
        if shared(gpu, &peers) {
            return Err(Error::invalid(OP, "a GPU for each thread", "threads that share one"));
        }
        let [failed, silent] = [memory.state.pointer() + 4 * FAILED, memory.silent.pointer()];
        Ok(Neighbours { peers, rank: self.rank, failed, silent })
    }

    /// What a norm is told that adds up by itself. Error: it does not ([`Collectives::sums_in_norm`]).
    pub(super) fn params(&self) -> Result<Ranks> {
        match &self.way {
            Way::Memory(memory) => Ok(memory.params(self.rank)),
            Way::Nccl(_) => Err(Error::invalid(OP, "memory that ranks write into", "NCCL")),
        }
    }
}

/// The memory of each other rank.
fn opened(gpu: &Gpu, rank: usize, addresses: &[Vec<u8>]) -> Result<Vec<Option<Peer>>> {
    let open = |(of, address): (usize, &Vec<u8>)| {
        if of == rank { Ok(None) } else { Peer::open(gpu.context(), address).map(Some) }
    };
    addresses.iter().enumerate().map(open).collect()
}

/// Whether another rank of this process is on the same GPU.
fn shared(gpu: &Gpu, peers: &[Option<Peer>]) -> bool {
    peers.iter().flatten().any(|peer| peer.is_on(gpu.context()))
}

/// Places of other ranks, for kernels of all ranks that run side by side. The collectives that it comes from must live as long.
#[derive(Debug)]
pub struct Neighbours {
    peers: Vec<Option<Peer>>,
    rank: usize,
    failed: u64,
    silent: u64,
}

impl Neighbours {
    pub(super) fn size(&self) -> usize {
        self.peers.len()
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Where each rank's places are, of which `own` are this one's.
    pub(super) fn pointers(&self, own: u64) -> impl Iterator<Item = u64> {
        self.peers.iter().map(move |peer| peer.as_ref().map_or(own, Peer::pointer))
    }

    /// Where the device says that a rank was silent, to itself and to the host.
    pub(super) fn failed(&self) -> u64 {
        self.failed
    }

    pub(super) fn silent(&self) -> u64 {
        self.silent
    }
}

impl Memory {
    /// What a kernel of this rank is told of all.
    fn params(&self, rank: usize) -> Ranks {
        let mut inboxes = [0; MOST_RANKS];
        for (inbox, peer) in inboxes.iter_mut().zip(&self.peers) {
            *inbox = peer.as_ref().map_or(self.mailbox.inbox.pointer(), Peer::pointer);
        }
        Ranks {
            inboxes,
            state: self.state.pointer(),
            silent: self.silent.pointer(),
            capacity: capacity(self.peers.len()) as u64,
            rank: rank as u32,
            size: self.peers.len() as u32,
            own_gpu: self.own_gpu.into(),
            padding: 0,
        }
    }
}

/// Whether kernels take four values at once: addresses and a number of them.
fn are_aligned(addresses: [u64; 2], elements: usize) -> bool {
    addresses.iter().all(|address| address.is_multiple_of(16)) && elements.is_multiple_of(4)
}

/// Puts one of the kernels into a stream, with its parameters.
fn put<P: Pod>(
    gpu: &Gpu,
    stream: &Stream,
    kernel: usize,
    [elements, most_blocks]: [usize; 2],
    params: &P,
) -> Result<()> {
    let blocks = elements.div_ceil(4 * THREADS).clamp(1, most_blocks);
    let form = gpu.overlapping(launch(OP, [blocks, 1, 1], THREADS as u32, 0)?);
    let function = gpu.function(&instances()[kernel])?;
    // SAFETY: the one parameter is the kernel's, whose lengths the callers have checked; peers stay open as long as `self`.
    unsafe { function.launch(stream, &form, &[Arg::new(params)]) }
}
