//! Models in memory, computed by the CPU.

mod experts;
mod profile;
mod projection;
mod run;
#[cfg(test)]
mod tests;
mod text;
mod texts;
mod vocabulary;

pub use projection::Projection;
pub(crate) use run::{Run, State, Tap};
pub use vocabulary::Vocabulary;

use super::{Resident, Room, Text, Texts};
use crate::arch::spec::{RopeSpec, Spec};
use crate::comm::Comm;
use crate::decoder::{Decoder, LoadDevice, ModelDevice};
use crate::device::rope::Rope;
use crate::error::Result;
use crate::explain::{self, PlanOfRows, Product};
use crate::load::{Embedding, Loader};
use crate::random::RandomFloats;
use halfbyte::cpu::Cpu;
use halfbyte::cpu::nn;
use halfbyte::kernel::{KvType, Problem};
use halfbyte::{Act, Float};
use halfbyte_checkpoint::{FloatData, StoredLinear, StoredWeight};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use text::CpuText;
use texts::CpuTexts;

/// The CPU, as the decoder knows it.
#[derive(Debug)]
pub(crate) struct OnCpu;

impl ModelDevice for OnCpu {
    type Projection = Projection;
    type Vector = Vec<f32>;
    type Rope = Rope<nn::Rope>;
    type Vocabulary = Vocabulary;
    type Run<'m> = Run<'m>;
}

impl LoadDevice for OnCpu {
    type Device = Self;

    fn projection(&mut self, layers: &[StoredLinear<'_>], act: Act, prefix: &str) -> Result<Projection> {
        Projection::new(layers, act, prefix)
    }

    fn random(&mut self, floats: &RandomFloats, bias: Option<Vec<f32>>) -> Result<Projection> {
        let drawn = FloatData::F16(Cow::Owned(floats.draw()?));
        let weight = StoredWeight::Dense { floats: drawn, shape: floats.shape() };
        Projection::new(&[StoredLinear { weight, bias, findings: Vec::new() }], Act::A16, "of random floats")
    }

    fn vector(&mut self, values: Vec<f32>) -> Result<Vec<f32>> {
        Ok(values)
    }

    fn rope(&mut self, rope: &RopeSpec, max_context: usize) -> Result<Rope<nn::Rope>> {
        Rope::new(rope, |frequencies| nn::Rope::new(frequencies.to_vec(), rope.factor, max_context))
    }

    fn vocabulary(
        &mut self,
        embedding: Embedding<'_>,
        tokens: Range<usize>,
        spec: &Spec,
        head: Option<Projection>,
        act: Act,
    ) -> Result<Vocabulary> {
        Vocabulary::new(embedding, tokens, spec, head, act)
    }

    fn layers<T: Send>(
        &mut self,
        loader: &mut Loader<'_>,
        count: usize,
        load: impl Fn(&mut Self, &mut Loader<'_>, usize) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        loader.side_by_side(count, |loader, i| load(&mut OnCpu, loader, i))
    }
}

/// A model in memory.
#[derive(Debug)]
pub(crate) struct CpuModel {
    pub decoder: Decoder<OnCpu>,
    pub comm: Arc<dyn Comm>,
    /// What texts keep their keys and values as.
    pub kv: KvType,
}

impl Resident for CpuModel {
    fn begin<'m>(&'m self, cpu: &'m Cpu, context: usize) -> Result<Box<dyn Text + 'm>> {
        Ok(Box::new(CpuText::new(self, cpu, context)?))
    }

    fn begin_many<'m>(&'m self, cpu: &'m Cpu, room: Room) -> Result<Box<dyn Texts + 'm>> {
        Ok(Box::new(CpuTexts::new(self, cpu, room.positions)?))
    }

    fn prepare(&self, _: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
        Ok(())
    }

    fn explain(&self, cpu: &Cpu) -> Result<Vec<Product>> {
        let mut products = Vec::new();
        for part in self.decoder.projections().flat_map(Projection::parts).filter(|part| part.format().is_some()) {
            let (n, k, x, y) = (part.n(), part.k(), Float::F32, Float::F32);
            let kernels = part.kernels(cpu, x, y)?;
            let ends = kernels.iter().skip(1).map(|(next, _)| next - 1).chain([usize::MAX]);
            let plan = |(&(first, kernel), last): (&(usize, _), usize)| PlanOfRows {
                rows: [first, last],
                kernel,
                configuration: String::new(),
                workspace_bytes: 0,
            };
            let plans = kernels.iter().zip(ends).map(plan).collect();
            explain::add(&mut products, Problem { format: part.format(), x, y, m: 1, n, k }, plans);
        }
        Ok(products)
    }

    fn bytes(&self) -> usize {
        let norms = self.decoder.norms().map(|norm| norm.weight.len() + norm.bias.as_ref().map_or(0, Vec::len));
        let projections: usize = self.decoder.projections().map(Projection::bytes).sum();
        norms.sum::<usize>() * size_of::<f32>() + projections + self.decoder.vocabulary.bytes()
    }

    fn bytes_of_step(&self, tokens: usize) -> usize {
        let idle = self.decoder.idle_bytes(tokens, Projection::bytes);
        self.bytes() - idle - self.decoder.vocabulary.bytes_not_read(tokens)
    }

    fn kv_bytes_per_token(&self) -> usize {
        let Decoder { layers, heads, .. } = &self.decoder;
        2 * layers.len() * heads.kv_heads * self.kv.bytes(heads.head_size)
    }
}
