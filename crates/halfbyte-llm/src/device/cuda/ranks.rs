//! What ranks that share a model on GPUs tell each other while a text is computed: by memory that they write into (`nn::Collectives`).
//!
//! Sums and parts of logits pass from device to device, within recorded steps. The host meets the other ranks' hosts when a text
//! begins, and asks them when a device has waited in vain.

use super::CudaModel;
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::shard::part;
use halfbyte::Cuda;
use halfbyte::cuda::driver::{Buffer, View, ViewMut};
use halfbyte::cuda::nn::{Collectives, Mailbox};
use std::sync::Arc;

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
        let (gpu, stream) = (cuda.gpu(), cuda.stream());
        let meet = || {
            let mailbox = Mailbox::new(gpu, stream, size)?;
            let addresses = comm.all_gather_bytes(&mailbox.address(gpu)?)?;
            let collectives = Collectives::new(gpu, stream, mailbox, rank, &addresses)?;
            // Nobody sends before all have opened what they were told of.
            stream.synchronize()?;
            comm.wait()?;
            Ok(collectives)
        };
        let collectives = meet().inspect_err(|why| {
            if !matches!(why, Error::Rank { .. }) {
                comm.leave(&format!("cannot reach the others' GPUs: {why}"));
            }
        })?;
        let widths: Vec<usize> = (0..size).map(|rank| part(vocab, rank, size).len()).collect();
        let context = gpu.context();
        let (logits, many_logits) = (context.allocate(texts * widths[rank])?, context.allocate(0)?);
        Ok(Some(Self { comm, collectives, widths, logits, many_logits }))
    }

    /// Adds up the ranks' values.
    pub(super) fn sum(&self, cuda: &Cuda, values: ViewMut<'_, f32>) -> Result<()> {
        Ok(self.collectives.all_reduce(cuda.gpu(), cuda.stream(), values)?)
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

    /// Whether all ranks were heard of in what the device has done. Error: why one was not.
    pub(super) fn heard(&self) -> Result<()> {
        let Err(rank) = self.collectives.heard() else { return Ok(()) };
        // One that has left said why, or its end is known.
        self.comm.wait()?;
        Err(Error::Rank { rank, what: "has not sent its part of a sum for 8 s".to_owned() })
    }
}
