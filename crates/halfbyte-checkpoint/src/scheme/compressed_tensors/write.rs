//! Writing compressed-tensors modules (`pack-quantized`), and the config that goes with them.

use super::packing::Packing;
use crate::config::is_head;
use crate::error::Result;
use crate::folder::HEAD;
use crate::safetensors::{DType, TensorSpec};
use crate::target::{Form, Module, Settings, exactly, floats, spec, unrepresentable};
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero, Zeros};
use serde_json::{Map, Value, json};

/// Writes compressed-tensors' form.
pub(crate) struct Writer;

/// The format nearest to this one that a module of this shape can have. Error: why there is none.
pub(crate) fn nearest(format: WeightFormat, [n, k]: [usize; 2]) -> std::result::Result<WeightFormat, String> {
    if n == 0 || k == 0 {
        return Err(format!("it has no empty tensors, got [{n}, {k}]"));
    }
    if let Group::Size(size) = format.group
        && !k.is_multiple_of(size)
    {
        return Err(format!("groups must divide the inputs, got groups of {size} for {k} inputs"));
    }
    let zero = if format.zero == Zero::Float { Zero::Integer } else { format.zero };
    Ok(WeightFormat { zero, channel_scale: None, ..format })
}

impl Form for Writer {
    fn specs(&self, module: &str, format: WeightFormat, [n, k]: [usize; 2]) -> Vec<TensorSpec> {
        let (packing, groups) = (Packing::dense(format.bits), format.group.count(k));
        let scales: &[usize] = if format.group == Group::Tensor { &[1] } else { &[n, groups] };
        let mut specs = vec![
            spec(module, "weight_packed", DType::I32, &[n, packing.words_of(k)]),
            spec(module, "weight_scale", format.scale.into(), scales),
            spec(module, "weight_shape", DType::I64, &[2]),
        ];
        if format.zero != Zero::Symmetric {
            // One for the whole tensor is a byte, and not packed.
            specs.push(match format.group {
                Group::Tensor => spec(module, "weight_zero_point", DType::I8, &[1]),
                _ => spec(module, "weight_zero_point", DType::I32, &[packing.words_of(n), groups]),
            });
        }
        specs
    }

    fn pack(&self, module: &str, q: &QTensor, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let (n, k, format) = (q.n(), q.k(), q.format());
        let refuse = |reason: String| Err(unrepresentable(module, "compressed-tensors")(reason));
        if q.group_index().is_some() {
            return refuse("it has had no group index, so no act-order, since version 0.20".into());
        }
        // A scale for the whole tensor is stored once.
        let (rows, groups) = if format.group == Group::Tensor { (1, 1) } else { (n, q.groups()) };
        let zeros = match q.zeros() {
            Zeros::Symmetric => None,
            Zeros::Integer(zeros) => {
                let zeros = &zeros[..rows * groups];
                if let Some(zero) = zeros.iter().find(|&&zero| u32::from(zero) > format.max_code()) {
                    return refuse(format!("zero points go from 0 to {}, got {zero}", format.max_code()));
                }
                Some(zeros.iter().map(|&zero| zero as u8).collect::<Vec<u8>>())
            }
            Zeros::Float(_) => return refuse("it has integer zero points only, no float offsets".into()),
        };
        let packing = Packing::dense(format.bits);
        put(bytemuck::cast_slice(&packing.pack(q.codes(), [n, k])))?;
        let scales = &q.scales()[..rows * groups];
        floats(scales, format.scale, put)?;
        put(bytemuck::cast_slice(&[n as i64, k as i64]))?;
        if let Some(zeros) = zeros {
            match format.group {
                Group::Tensor => put(&[zeros.first().map_or(0, |&zero| zero.wrapping_sub(format.middle() as u8))])?,
                _ => put(bytemuck::cast_slice(&packing.pack_columns(&zeros, [rows, groups])))?,
            }
        }
        Ok(())
    }

    /// The fields that compressed-tensors, transformers and vLLM read: a group of settings for each format, the commonest
    /// for every linear layer, the others by name. The head has one of its own: where it is no linear layer but a kind of embedding,
    /// as in vLLM and SGLang, it is found by its name alone.
    fn config(&self, model: &Settings<'_>) -> Result<Option<Value>> {
        let same = |a: &WeightFormat, b: &WeightFormat| WeightFormat { scale: b.scale, ..*a } == *b;
        let mut groups: Vec<(WeightFormat, bool, Vec<&str>)> = Vec::new();
        for Module { name, format, .. } in model.quantized {
            let of_head = is_head(name);
            match groups.iter_mut().find(|(known, head, _)| *head == of_head && same(known, format)) {
                Some((.., names)) => names.push(name),
                None => groups.push((*format, of_head, vec![name])),
            }
        }
        let common = model.commonest(|format| WeightFormat { scale: Float::F16, ..*format });
        // Settings by name come first, since the first that fits a module is taken.
        groups.sort_by_key(|(format, head, _)| !head && common.is_some_and(|common| same(format, &common)));
        let mut config_groups = Map::new();
        for (i, (format, of_head, names)) in groups.iter().enumerate() {
            let targets: Vec<String> = match of_head {
                true => names.iter().map(|name| (*name).to_owned()).collect(),
                false if i + 1 == groups.len() => vec!["Linear".into()],
                false => names.iter().map(|name| format!("re:{}", exactly(name))).collect(),
            };
            let group = json!({
                "targets": targets,
                "weights": weights_of(format),
                "input_activations": null,
                "output_activations": null,
            });
            config_groups.insert(format!("group_{i}"), group);
        }
        let mut ignore = model.dense.to_vec();
        if !model.quantized.iter().any(|module| module.name == HEAD) {
            // It is a linear layer even where its weight is the embedding and no tensor has its name.
            ignore.push(HEAD.into());
        }
        Ok(Some(json!({
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": config_groups,
            "ignore": ignore,
            "kv_cache_scheme": null,
            "global_compression_ratio": null,
        })))
    }
}

/// Settings of one format.
fn weights_of(format: &WeightFormat) -> Value {
    let (strategy, group_size) = match format.group {
        Group::Tensor => ("tensor", None),
        Group::Channel => ("channel", None),
        Group::Size(size) => ("group", Some(size)),
    };
    json!({
        "num_bits": format.bits,
        "type": "int",
        "symmetric": format.zero == Zero::Symmetric,
        "strategy": strategy,
        "group_size": group_size,
        "dynamic": false,
        "actorder": null,
        "block_structure": null,
        "observer": "minmax",
        "observer_kwargs": {},
    })
}
