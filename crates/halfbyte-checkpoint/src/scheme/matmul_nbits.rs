//! ONNX's `MatMulNBits`, see [`crate::onnx`]: a product's initialisers under the names that [`Part`] gives them.

use super::{Scheme, Weights};
use crate::checkpoint::Container;
use crate::error::{Error, Result};
use crate::onnx::files::Part;
use crate::onnx::{self, BlockLayout, Blocks, MatMulNBits, Product, TensorBytes, describe, load, pack};
use crate::safetensors::TensorSpec;
use crate::target::{Form, Module, Settings};
use crate::writer::Writer;
use halfbyte::{Group, QTensor, WeightFormat, Zero};
use serde_json::Value;
use std::collections::HashSet;
use std::path::Path;

/// The scheme's line in [`super::SCHEMES`].
pub(super) const SCHEME: Scheme = Scheme {
    name: "MatMulNBits",
    parts: &[Part::Weight.ending(), Part::Scales.ending(), Part::ZeroPoints.ending(), Part::GroupIndex.ending()],
    activations: &[],
    detect: |weights, prefix| weights.checkpoint().contains(&Part::Weight.name(prefix)),
    describe: |weights, prefix| {
        let (file, product, blocks) = product(weights, prefix)?;
        describe(file, product, &blocks)
    },
    load: |weights, prefix| {
        let (file, product, blocks) = product(weights, prefix)?;
        load(file, product, &blocks)
    },
};

fn product<'a>(weights: &'a Weights, prefix: &str) -> Result<(&'a Path, &'a MatMulNBits, Blocks<'a>)> {
    let checkpoint = weights.checkpoint();
    let part = |part: Part| {
        let name = part.name(prefix);
        let info = checkpoint.info(&name)?;
        Ok(TensorBytes { dtype: info.dtype, shape: info.shape, bytes: checkpoint.bytes(&name)? })
    };
    // The model itself comes before the files of its external data.
    let file = checkpoint.files().next().unwrap_or(checkpoint.path());
    let known = match checkpoint.container() {
        Container::Onnx(model) => model.products().iter().find(|product| product.prefix == prefix),
        Container::Plain | Container::Gguf(_) => None,
    };
    let product = known.ok_or_else(|| {
        let what = format!("module `{prefix}`: expected a MatMulNBits node, which only ONNX models have");
        Error::malformed(file, what)
    })?;
    let blocks = Blocks {
        weight: part(Part::Weight)?,
        scales: part(Part::Scales)?,
        zero_points: product.zero_points.as_ref().map(|_| part(Part::ZeroPoints)).transpose()?,
        g_idx: product.g_idx.as_ref().map(|_| part(Part::GroupIndex)).transpose()?,
    };
    Ok((file, product, blocks))
}

/// Writes modules as products of an ONNX model.
pub(crate) struct OnnxForm;

fn layout_of(module: &str, format: WeightFormat, shape: [usize; 2]) -> Result<BlockLayout> {
    BlockLayout::of(module, format, shape, format.scale)
}

/// The format nearest to this one that a module of this shape can have. Error: why there is none.
pub(crate) fn nearest(format: WeightFormat, shape: [usize; 2]) -> std::result::Result<WeightFormat, String> {
    let bits = if format.bits == 3 { 4 } else { format.bits };
    let zero = if format.zero == Zero::Float { Zero::Integer } else { format.zero };
    let format = WeightFormat { bits, zero, channel_scale: None, ..format };
    let layout = layout_of("", format, shape).map_err(|error| match error {
        Error::Unrepresentable { reason, .. } => reason,
        other => other.to_string(),
    })?;
    let block = layout.block_size();
    Ok(WeightFormat { group: if block < shape[1] { Group::Size(block) } else { Group::Channel }, ..format })
}

impl Form for OnnxForm {
    fn specs(&self, module: &str, format: WeightFormat, shape: [usize; 2]) -> Vec<TensorSpec> {
        let layout = layout_of(module, format, shape).into_iter();
        layout
            .flat_map(|layout| layout.tensors().collect::<Vec<_>>())
            .map(|(ending, dtype, shape)| TensorSpec { name: format!("{module}.{ending}"), dtype, shape })
            .collect()
    }

    fn pack(&self, module: &str, q: &QTensor, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        pack(module, q, q.format().scale)?.parts().try_for_each(put)
    }

    fn config(&self, _: &Settings<'_>) -> Result<Option<Value>> {
        Ok(None)
    }

    fn create(&self, dir: &Path, tensors: &[TensorSpec], model: &Settings<'_>, _: u64) -> Result<Writer> {
        let mut products = Vec::new();
        let mut of_products = HashSet::new();
        for Module { name, format, shape } in model.quantized {
            let layout = layout_of(name, *format, *shape)?;
            of_products.extend(self.specs(name, *format, *shape).into_iter().map(|spec| spec.name));
            products.push(Product { prefix: name.clone(), layout, bias: false, accuracy_level: 0 });
        }
        let others: Vec<TensorSpec> = tensors.iter().filter(|t| !of_products.contains(&t.name)).cloned().collect();
        onnx::create(dir, &products, &others, &[])
    }
}
