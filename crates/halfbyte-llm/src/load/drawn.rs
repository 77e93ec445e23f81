//! Random layers of a rank: drawn for it alone where its part is one run of rows and columns, else cut from the whole.

use super::{Loader, Source, StoredLinear, StoredWeight};
use crate::arch::spec::{LinearSpec, Shape};
use crate::error::Result;
use crate::random::{self, RandomFloats};
use halfbyte::{Group, StoredTensor, WeightFormat};
use halfbyte_checkpoint::{Cut, FloatData};
use std::borrow::Cow;
use std::ops::Range;

impl<'a> Loader<'a> {
    /// Layers that read the same vector as one matrix of random floats, with their biases; `head`: they are the head. None: they come
    /// from a file, have codes, or are cut otherwise than into runs of rows.
    pub(crate) fn floats(
        &mut self,
        layers: &[(&LinearSpec, Cut)],
        head: bool,
    ) -> Option<(RandomFloats, Option<Vec<f32>>)> {
        let (Source::Random(random), [(first, _), ..]) = (self.source, layers) else { return None };
        let format = if head { random.head } else { random.format };
        let rows = |(layer, cut): &(&LinearSpec, Cut)| {
            let k = layer.shape.k;
            let (rows, columns) = single(cut)?;
            RandomFloats::of_rows(k, &layer.name, &rows).filter(|_| columns == (0..k))
        };
        if format.is_some() {
            return None;
        }
        let parts = layers.iter().map(rows).collect::<Option<Vec<_>>>()?;
        let bias = |(layer, cut): &(&LinearSpec, Cut)| match layer.shape.bias && cut.bias {
            true => bias(&layer.name, layer.shape.n)[cut.rows[0].clone()].to_vec(),
            false => vec![0.0; cut.rows[0].len()],
        };
        let biased = layers.iter().any(|(layer, cut)| layer.shape.bias && cut.bias);
        let biases = biased.then(|| layers.iter().flat_map(bias).collect());
        for ((layer, _), (n, _)) in layers.iter().zip(&parts) {
            self.parameters += *n as u64 * layer.shape.k as u64 + if layer.shape.bias { *n as u64 } else { 0 };
        }
        Some((RandomFloats { k: first.shape.k, parts }, biases))
    }

    /// A rank's part of a random layer.
    pub(super) fn drawn(
        &mut self,
        prefix: &str,
        shape: Shape,
        cut: &Cut,
        format: Option<WeightFormat>,
    ) -> Result<StoredLinear<'a>> {
        let Shape { n, k, .. } = shape;
        if let (Some(format), Some((rows, columns))) = (format, single(cut)) {
            let in_group = |size| columns.start.is_multiple_of(size);
            if in_group(32) && !matches!(format.group, Group::Size(size) if !in_group(size)) {
                let own = shape.bias && cut.bias;
                let bias = own.then(|| bias(prefix, n)[rows.clone()].to_vec());
                self.parameters += (rows.len() * columns.len()) as u64 + bias.as_ref().map_or(0, |b| b.len() as u64);
                let codes = StoredTensor::random_part(format, [n, k], random::seed_of(prefix), [rows, columns])?;
                return Ok(StoredLinear { weight: StoredWeight::Quantized(codes), bias, findings: Vec::new() });
            }
        }
        let weight = match format {
            Some(format) => StoredWeight::Quantized(StoredTensor::random(format, [n, k], random::seed_of(prefix))?),
            None => {
                let floats = RandomFloats::new(k, std::iter::once((prefix, n))).draw()?;
                StoredWeight::Dense { floats: FloatData::F16(Cow::Owned(floats)), shape: [n, k] }
            }
        };
        let layer = StoredLinear { weight, bias: shape.bias.then(|| bias(prefix, n)), findings: Vec::new() };
        self.part(layer, prefix, shape, cut)
    }
}

/// The rows and columns of a part, if they are one run each.
fn single(cut: &Cut) -> Option<(Range<usize>, Range<usize>)> {
    let ([rows], [columns]) = (&cut.rows[..], &cut.columns[..]) else { return None };
    Some((rows.clone(), columns.clone()))
}

/// A random bias.
fn bias(layer: &str, n: usize) -> Vec<f32> {
    random::vector(&format!("{layer}.bias"), n, 0.0, 0.05)
}
