//! What ranks that share a model on GPUs tell each other while a text is computed: by memory that they write into, or by NCCL where one of
//! them does not reach another's (`nn::Collectives`).
//!
//! Sums and parts of logits pass from device to device, within recorded steps. The host meets the other ranks' hosts when a text
//! begins, and asks them when a device has waited in vain. NCCL waits without end: there the host looks after them meanwhile.

use super::CudaModel;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::shard::part;
use halfbyte::Cuda;
use halfbyte::cuda::driver::{Buffer, FloatViewMut, View, ViewMut};
use halfbyte::cuda::nccl::{Nccl, NcclId, NcclLibrary};
use halfbyte::cuda::nn::{Collectives, Mailbox, PersistentDecode};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The variable that says by what ranks tell each other: memory or nccl; unset: memory, or NCCL where that is not to be had.
const VARIABLE: &str = "HALFBYTE_COLLECTIVES";

/// What errors name.
const OP: &str = "ranks on GPUs";

/// How often the host looks after the other ranks while it waits for NCCL.
const LOOK: Duration = Duration::from_millis(500);

/// This rank's end of a text's collectives, and its part of the logits.
#[derive(Debug)]
pub(super) struct Ranks {
    comm: Arc<dyn Comm>,
    collectives: Collectives,
    /// Tokens of each rank.
    widths: Vec<usize>,
    /// Of this rank's tokens, for steps that are recorded.
    logits: Buffer<f32>,
    /// The same where logits of many rows are asked for; grows.
    many_logits: Buffer<f32>,
}

impl Ranks {
    /// Meets the others, for steps of so many texts; None: there are no others. Errors: a rank that has left, that is on another host, or
    /// whose GPU this one does not reach; on every rank.
    pub(super) fn meet(model: &CudaModel, cuda: &Cuda, texts: usize) -> Result<Option<Self>> {
        let comm = model.comm.clone();
        let (rank, size, vocab) = (comm.rank(), comm.size(), model.decoder.vocab);
        if size < 2 {
            return Ok(None);
        }
        let collectives = meet(&*comm, cuda)?;
        let widths: Vec<usize> = (0..size).map(|rank| part(vocab, rank, size).len()).collect();
        let context = cuda.gpu().context();
        let (logits, many_logits) = (context.allocate(texts * widths[rank])?, context.allocate(0)?);
        Ok(Some(Self { comm, collectives, widths, logits, many_logits }))
    }

    /// A kernel that all ranks run side by side, each with its part of the model; None: one of them does not.
    pub(super) fn side_by_side(&self, cuda: &Cuda, kernel: PersistentDecode) -> Result<Option<PersistentDecode>> {
        if self.collectives.nccl().is_some() {
            return Ok(None);
        }
        let addresses = self.comm.all_gather_bytes(&kernel.address(cuda.gpu()).unwrap_or_default())?;
        let met = self.collectives.neighbours(cuda.gpu(), &addresses);
        // Nobody writes before all have opened what they were told of.
        let all = self.comm.all_gather_bytes(&[met.is_ok().into()])?;
        match met {
            Ok(neighbours) if all.iter().all(|met| *met == [1]) => Ok(Some(kernel.meet(neighbours)?)),
            _ => Ok(None),
        }
    }

    /// Adds up the ranks' values.
    pub(super) fn sum(&self, cuda: &Cuda, values: ViewMut<'_, f32>) -> Result<()> {
        Ok(self.collectives.all_reduce(cuda.gpu(), cuda.stream(), values)?)
    }

    /// Adds the sums of the ranks' values to others; these values are undefined then.
    pub(super) fn sum_into(&self, cuda: &Cuda, values: ViewMut<'_, f32>, into: ViewMut<'_, f32>) -> Result<()> {
        Ok(self.collectives.all_reduce_into(cuda.gpu(), cuda.stream(), values, into)?)
    }

    /// The rows of m whose sums and norms are this rank's; None: every rank has all.
    pub(super) fn own_rows(&self, m: usize, length: usize) -> Option<Range<usize>> {
        self.collectives.own_rows(m, length)
    }

    /// Adds the sums of the ranks' values to this rank's rows.
    pub(super) fn sum_own_rows(
        &self,
        cuda: &Cuda,
        values: View<'_, f32>,
        into: ViewMut<'_, f32>,
        shape: [usize; 2],
    ) -> Result<()> {
        Ok(self.collectives.reduce_scatter_into(cuda.gpu(), cuda.stream(), values, into, shape)?)
    }

    /// Brings the rows that are other ranks'.
    pub(super) fn gather_rows(&self, cuda: &Cuda, rows: FloatViewMut<'_>, shape: [usize; 2]) -> Result<()> {
        Ok(self.collectives.all_gather_rows(cuda.gpu(), cuda.stream(), rows, shape)?)
    }

    /// What a norm of so many rows adds up the ranks' updates by; None: in a launch before it.
    pub(super) fn in_norm(&self, m: usize, length: usize) -> Option<&Collectives> {
        Some(&self.collectives).filter(|ranks| ranks.sums_in_norm(m, length))
    }

    /// Room for this rank's part of the logits of so many rows. What a recorded step was given stays where it is.
    pub(super) fn own_logits(&mut self, cuda: &Cuda, rows: usize) -> Result<&mut Buffer<f32>> {
        let len = rows * self.widths[self.comm.rank()];
        if len <= self.logits.len() {
            return Ok(&mut self.logits);
        }
        if len > self.many_logits.len() {
            self.many_logits = cuda.gpu().context().allocate(len)?;
        }
        Ok(&mut self.many_logits)
    }

    /// The logits of so many rows, from every rank's part, of which this one's is where [`Ranks::own_logits`] said.
    pub(super) fn join_logits(&self, cuda: &Cuda, rows: usize, all: ViewMut<'_, f32>) -> Result<()> {
        let len = rows * self.widths[self.comm.rank()];
        let own = if len <= self.logits.len() { &self.logits } else { &self.many_logits };
        let own: View<'_, f32> = own.view().slice(0..len);
        Ok(self.collectives.all_gather(cuda.gpu(), cuda.stream(), own, &self.widths, all)?)
    }

    /// Waits for what the device does, as long as all ranks are there. Error: one has left.
    pub(super) fn wait(&self, cuda: &Cuda) -> Result<()> {
        let (Some(nccl), mut looked) = (self.collectives.nccl(), Instant::now()) else { return Ok(()) };
        while !cuda.stream().is_done()? {
            if looked.elapsed() > LOOK {
                let all = self.comm.look().and_then(|()| Ok(nccl.state()?));
                all.inspect_err(|_| nccl.abort())?;
                looked = Instant::now();
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Whether all ranks were heard of in what the device has done. Error: why one was not.
    pub(super) fn heard(&self) -> Result<()> {
        let Err(rank) = self.collectives.heard() else { return Ok(()) };
        // One that has left said why, or its end is known.
        self.comm.wait()?;
        Err(Error::Rank { rank, what: "has not sent its part of a sum for 8 s".to_owned() })
    }
}

/// What ranks begin together, each for its part of a model: what this one has made ready, once all others have theirs and it has
/// met them. Errors: its own; that of the first rank that has nothing ready, after which all may begin another; of meeting, after
/// which the ranks are of no use to each other.
pub(super) fn together<T>(comm: &dyn Comm, ready: Result<T>, meet: impl FnOnce(&mut T) -> Result<()>) -> Result<T> {
    let mut ready = all_ready(comm, ready)?;
    meet(&mut ready).inspect_err(|why| {
        if !matches!(why, Error::Rank { .. }) {
            comm.leave(&format!("cannot reach the others' GPUs: {why}"));
        }
    })?;
    Ok(ready)
}

/// What this rank has made ready, if all others have too.
fn all_ready<T>(comm: &dyn Comm, own: Result<T>) -> Result<T> {
    if comm.size() < 2 {
        return own;
    }
    // Who has something ready says nothing.
    let said = own.as_ref().err().map(ToString::to_string).unwrap_or_default();
    let all = comm.all_gather_bytes(said.as_bytes());
    let (own, all) = (own?, all?);
    match all.iter().position(|said| !said.is_empty()) {
        None => Ok(own),
        Some(rank) => {
            let what = format!("cannot begin a text: {}", String::from_utf8_lossy(&all[rank]));
            Err(Error::Rank { rank, what })
        }
    }
}

/// Meets the others, on every rank in the same way: by memory if each reaches that of all others.
fn meet(comm: &dyn Comm, cuda: &Cuda) -> Result<Collectives> {
    let asked = std::env::var_os(VARIABLE).unwrap_or_default().to_string_lossy().into_owned();
    if !["", "memory", "nccl"].contains(&&*asked) {
        return Err(Error::invalid(OP, format!("memory or nccl in {VARIABLE}"), asked));
    }
    let (gpu, stream) = (cuda.gpu(), cuda.stream());
    let own = || {
        if asked == "nccl" {
            return Err(Error::invalid(OP, "memory", format!("{VARIABLE} names NCCL")));
        }
        let mailbox = Mailbox::new(gpu, stream, comm.size())?;
        Ok((mailbox.address(gpu)?, mailbox))
    };
    // Who has none says nothing, which is no address.
    let (address, mailbox) = match own() {
        Ok((address, mailbox)) => (address, Ok(mailbox)),
        Err(why) => (Vec::new(), Err(why)),
    };
    let addresses = comm.all_gather_bytes(&address)?;
    let by_memory = mailbox.and_then(|mailbox| {
        let collectives = Collectives::new(gpu, stream, mailbox, comm.rank(), &addresses)?;
        stream.synchronize()?;
        Ok(collectives)
    });
    // Nobody sends before all have opened what they were told of.
    let reached = comm.all_gather_bytes(&[by_memory.is_ok().into()])?;
    match by_memory {
        Ok(collectives) if reached.iter().all(|reached| *reached == [1]) => Ok(collectives),
        Err(why) if asked == "memory" => Err(why),
        Ok(_) if asked == "memory" => {
            let rank = reached.iter().position(|reached| *reached != [1]).unwrap_or_default();
            Err(Error::Rank {
                rank,
                what: format!("does not reach the memory of the others, which {VARIABLE} asks for"),
            })
        }
        Err(why) => by_nccl(comm, cuda, &why.to_string()),
        Ok(_) => by_nccl(comm, cuda, "another one does not reach its"),
    }
}

/// Meets the others by NCCL. Errors: a rank that has no such library, which all name; those of NCCL.
fn by_nccl(comm: &dyn Comm, cuda: &Cuda, why: &str) -> Result<Collectives> {
    let library = NcclLibrary::open().and_then(|library| Ok((library.id()?, library)));
    let said = match &library {
        Ok((id, _)) => [&[1][..], &id.bytes()].concat(),
        Err(missing) => {
            format!("\0does not reach memory of the others ({why}), and has no NCCL: {missing}").into_bytes()
        }
    };
    let all = comm.all_gather_bytes(&said)?;
    if let Some(rank) = all.iter().position(|said| said.first() != Some(&1)) {
        let what = String::from_utf8_lossy(all[rank].get(1..).unwrap_or_default()).into_owned();
        return Err(Error::Rank { rank, what });
    }
    let id = all[0][1..].first_chunk().copied().map(NcclId::of);
    let Some(id) = id else { return Err(Error::Rank { rank: 0, what: "says no id of NCCL".into() }) };
    let (_, library) = library?;
    Ok(Collectives::by_nccl(Nccl::meet(cuda.gpu(), library, id, comm.rank(), comm.size())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{Alone, Thread};

    /// What comes of each rank's part, which grows by 1 where they meet.
    fn begun(ready: [Result<u32>; 3], comms: &[Thread]) -> Vec<Result<u32>> {
        std::thread::scope(|scope| {
            let meet = |own: &mut u32| {
                *own += 1;
                Ok(())
            };
            let ranks = ready.into_iter().zip(comms);
            let threads: Vec<_> = ranks.map(|(own, comm)| scope.spawn(move || together(comm, own, meet))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn nobody_begins_before_all_are_ready_and_all_may_begin_again() {
        let comms = Thread::group(3);
        for _ in 0..3 {
            let missing = Err(Error::invalid(OP, "memory", "none"));
            let results = begun([Ok(4), missing, Ok(5)], &comms);
            assert!(matches!(results[1], Err(Error::Invalid { .. })), "{results:?}");
            for of_other in [&results[0], &results[2]] {
                assert!(
                    matches!(of_other, Err(Error::Rank { rank: 1, what }) if what.contains("memory")),
                    "{of_other:?}"
                );
            }
            let results = begun([Ok(1), Ok(2), Ok(3)], &comms);
            assert!(matches!(results[..], [Ok(2), Ok(3), Ok(4)]), "{results:?}");
        }
        assert!(matches!(together(&Alone, Ok(1), |_| Ok(())), Ok(1)));
    }
}
