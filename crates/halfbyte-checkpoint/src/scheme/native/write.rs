//! Writing modules of our own form, and the config that goes with them.

use super::read::{name_of, points};
use crate::error::Result;
use crate::safetensors::{DType, TensorSpec};
use crate::scheme::compressed_tensors::packing::Packing;
use crate::target::{Form, Module, Settings, floats, spec};
use halfbyte::{Group, QTensor, WeightFormat, Zero, Zeros};
use serde_json::{Map, Value, json};

/// Writes our own form.
pub(crate) struct Writer;

/// The format nearest to this one that a module of this shape can have: itself. Error: it has no numbers.
pub(crate) fn nearest(format: WeightFormat, [n, k]: [usize; 2]) -> std::result::Result<WeightFormat, String> {
    if [n, k].iter().any(|&size| size == 0 || size > u32::MAX as usize) {
        return Err(format!("it has tensors of 1 to 2³² − 1 rows and columns, got [{n}, {k}]"));
    }
    Ok(format)
}

impl Form for Writer {
    fn specs(&self, module: &str, format: WeightFormat, [n, k]: [usize; 2]) -> Vec<TensorSpec> {
        specs(module, format, [n, k], format.group.count(k))
    }

    fn pack(&self, _: &str, q: &QTensor, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        pack(q, put)
    }

    fn config(&self, model: &Settings<'_>) -> Result<Option<Value>> {
        let common = model.commonest(|format| name_of(*format));
        let mut modules = Map::new();
        for Module { name, format, .. } in model.quantized {
            let own = name_of(*format);
            if Some(&own) != common.as_ref() {
                modules.insert(name.clone(), own.into());
            }
        }
        Ok(Some(json!({
            "quant_method": "halfbyte",
            "version": 1,
            "format": common,
            "modules": modules,
            "dense": model.dense,
        })))
    }
}

/// The tensors of a module; a part of a matrix may have more groups than its columns would fill.
pub(crate) fn specs(module: &str, format: WeightFormat, [n, k]: [usize; 2], groups: usize) -> Vec<TensorSpec> {
    let full = groups == format.group.count(k);
    let mut specs = vec![
        spec(module, "codes", DType::I32, &[n, Packing::dense(format.bits).words_of(k)]),
        spec(module, "layout", DType::I64, &[if full { 4 } else { 5 }]),
    ];
    match format.channel_scale {
        None => specs.push(spec(module, "scales", format.scale.into(), &[n, groups])),
        Some(channel) => {
            specs.push(spec(module, "scales", channel.into(), &[n]));
            specs.push(spec(module, "factors", DType::U8, &[n, groups]));
        }
    }
    match format.zero {
        Zero::Symmetric => {}
        Zero::Integer => specs.push(spec(module, "zero_points", points(format.bits), &[n, groups])),
        Zero::Float => specs.push(spec(module, "offsets", format.scale.into(), &[n, groups])),
    }
    if groups > 1 {
        specs.push(spec(module, "group_index", DType::I32, &[k]));
    }
    specs
}

/// Hands on their bytes, in that order.
pub(crate) fn pack(q: &QTensor, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let (n, k, format) = (q.n(), q.k(), q.format());
    put(bytemuck::cast_slice(&Packing::dense(format.bits).pack(q.codes(), [n, k])))?;
    let group = match format.group {
        Group::Channel => -1,
        Group::Tensor => 0,
        Group::Size(size) => size as i64,
    };
    let layout = [n as i64, k as i64, i64::from(format.bits), group, q.groups() as i64];
    let full = q.groups() == format.group.count(k);
    put(bytemuck::cast_slice(if full { &layout[..4] } else { &layout }))?;
    match (format.channel_scale, q.channel_scales(), q.factors()) {
        (Some(channel), Some(scales), Some(factors)) => {
            floats(scales, channel, put)?;
            put(factors)?;
        }
        _ => floats(q.scales(), format.scale, put)?,
    }
    match q.zeros() {
        Zeros::Symmetric => {}
        Zeros::Integer(zeros) if points(format.bits) == DType::U16 => put(bytemuck::cast_slice(zeros))?,
        Zeros::Integer(zeros) => put(&zeros.iter().map(|&zero| zero as u8).collect::<Vec<u8>>())?,
        Zeros::Float(offsets) => floats(offsets, format.scale, put)?,
    }
    if q.groups() > 1 {
        let index: Vec<i32> = (0..k).map(|j| q.group_of(j) as i32).collect();
        put(bytemuck::cast_slice(&index))?;
    }
    Ok(())
}
