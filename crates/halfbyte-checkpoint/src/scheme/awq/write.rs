//! Writing AWQ modules in the layout `gemm`, and the config that goes with them.

use super::pack::pack_gemm;
use super::read::transposed;
use crate::error::{Error, Result};
use crate::safetensors::{DType, TensorSpec};
use crate::target::{Form, Module, Settings, f16_scales, spec, unrepresentable};
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero, Zeros};
use serde_json::{Value, json};

/// Writes AWQ's form.
pub(crate) struct Writer;

/// The format nearest to this one that a module of this shape can have. Error: why there is none.
pub(crate) fn nearest(format: WeightFormat, [n, k]: [usize; 2]) -> std::result::Result<WeightFormat, String> {
    if n == 0 || k == 0 || !n.is_multiple_of(8) {
        return Err(format!("outputs must be a multiple of 8, got {n}"));
    }
    let group = match format.group {
        Group::Size(size) if !k.is_multiple_of(size) => {
            return Err(format!("groups must divide the inputs, got groups of {size} for {k} inputs"));
        }
        Group::Size(size) => Group::Size(size),
        Group::Tensor | Group::Channel => Group::Channel,
    };
    // Readers take a file as symmetric where every zero point is 8.
    let zero = if format.zero == Zero::Float { Zero::Integer } else { format.zero };
    Ok(WeightFormat { bits: 4, group, zero, scale: Float::F16, channel_scale: None })
}

impl Form for Writer {
    fn specs(&self, module: &str, format: WeightFormat, [n, k]: [usize; 2]) -> Vec<TensorSpec> {
        let groups = format.group.count(k);
        vec![
            spec(module, "qweight", DType::I32, &[k, n / 8]),
            spec(module, "qzeros", DType::I32, &[groups, n / 8]),
            spec(module, "scales", DType::F16, &[groups, n]),
        ]
    }

    fn pack(&self, module: &str, q: &QTensor, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let (n, k, groups) = (q.n(), q.k(), q.groups());
        let refuse = unrepresentable(module, "awq");
        if q.group_index().is_some() {
            return Err(refuse("it has no group index, so no act-order".into()));
        }
        let scales = f16_scales(q).map_err(&refuse)?;
        let zeros: Vec<u8> = match q.zeros() {
            Zeros::Symmetric => vec![8; n * groups],
            Zeros::Integer(zeros) => match zeros.iter().find(|&&zero| zero > 15) {
                None => zeros.iter().map(|&zero| zero as u8).collect(),
                Some(zero) => return Err(refuse(format!("zero points go from 0 to 15, got {zero}"))),
            },
            Zeros::Float(_) => {
                return Err(refuse("it has integer zero points only, no float offsets".into()));
            }
        };
        put(bytemuck::cast_slice(&pack_gemm(q.codes(), [n, k])))?;
        put(bytemuck::cast_slice(&pack_gemm(&zeros, [n, groups])))?;
        put(bytemuck::cast_slice(&transposed(&scales, n, groups)))
    }

    /// The fields that AutoAWQ, transformers and vLLM read.
    fn config(&self, model: &Settings<'_>) -> Result<Option<Value>> {
        let group_of = |format: &WeightFormat| match format.group {
            Group::Size(size) => i64::try_from(size).unwrap_or(i64::MAX),
            Group::Channel | Group::Tensor => -1,
        };
        let group_size = model.commonest(group_of).unwrap_or(-1);
        if let Some(Module { name, format, .. }) = model.quantized.iter().find(|m| group_of(&m.format) != group_size) {
            let got = format!("{} in `{name}`, {group_size} elsewhere", group_of(format));
            return Err(Error::invalid("write AWQ", "one group size for the whole model", got));
        }
        let mut config = json!({
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "zero_point": true,
            "version": "gemm",
            "modules_to_not_convert": if model.dense.is_empty() { Value::Null } else { json!(model.dense) },
        });
        // vLLM and SGLang ask for it; where it is missing they take the head for floats.
        if let (true, Value::Object(fields)) = (model.has_head(), &mut config) {
            fields.insert("lm_head".into(), true.into());
        }
        Ok(Some(config))
    }
}
