//! Writing GPTQ modules, and the config that goes with them.

use super::read::transposed;
use super::stream;
use crate::config::GptqVersion;
use crate::error::Result;
use crate::safetensors::{DType, TensorSpec};
use crate::target::{Form, Module, Settings, exactly, f16_scales, spec, unrepresentable};
use half::f16;
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero, Zeros};
use serde_json::{Map, Value, json};

/// A quantised module as GPTQ files hold it.
#[derive(Clone, Debug, PartialEq)]
pub struct GptqTensors {
    /// Codes, `[k·bits/32, n]`.
    pub qweight: Vec<i32>,
    /// Zero points, `[groups, n·bits/32]`.
    pub qzeros: Vec<i32>,
    /// Scales, `[groups, n]`.
    pub scales: Vec<f16>,
    /// Group of each column, `[k]`.
    pub g_idx: Vec<i32>,
}

/// Packs a tensor as GPTQ does, without loss.
///
/// *Errors:* what GPTQ files cannot hold, with the module's name: float offsets, n or k not a multiple of 32, scales that are not
/// exact in f16, groups that are not full (of a part of a matrix), a zero point of 0 in `gptq` (which stores it less one) or of `2^bits` in `gptq_v2`.
pub fn pack(module: &str, q: &QTensor, version: GptqVersion) -> Result<GptqTensors> {
    let refuse = unrepresentable(module, "gptq");
    let format = q.format();
    let (n, k, groups, bits) = (q.n(), q.k(), q.groups(), format.bits);
    nearest(format, [n, k]).map_err(&refuse)?;
    if groups != format.group.count(k) {
        return Err(refuse(format!("its groups are full, and {groups} share {k} columns")));
    }
    let scales = f16_scales(q).map_err(&refuse)?;
    let less = u16::from(version == GptqVersion::V1);
    let middle = format.middle() as u16;
    let zeros = match q.zeros() {
        Zeros::Symmetric => vec![(middle - less) as u8; n * groups],
        Zeros::Integer(zeros) => {
            let mut stored = Vec::with_capacity(zeros.len());
            for &zero in zeros {
                match zero.checked_sub(less) {
                    Some(z) if u32::from(z) <= format.max_code() => stored.push(z as u8),
                    _ => {
                        let range = format!("{less} to {}", format.max_code() + u32::from(less));
                        return Err(refuse(format!("zero points of {} go from {range}, got {zero}", version.name())));
                    }
                }
            }
            stored
        }
        Zeros::Float(_) => return Err(refuse("it has integer zero points only, no float offsets".into())),
    };
    Ok(GptqTensors {
        qweight: stream::pack_columns(q.codes(), bits, [n, k]),
        qzeros: stream::pack_rows(&transposed(&zeros, n, groups), bits),
        scales: transposed(&scales, n, groups),
        g_idx: (0..k).map(|j| q.group_of(j) as i32).collect(),
    })
}

/// Writes GPTQ's form.
pub(crate) struct Writer(pub GptqVersion);

/// The format nearest to this one that a module of this shape can have. Error: why there is none.
pub(crate) fn nearest(format: WeightFormat, [n, k]: [usize; 2]) -> std::result::Result<WeightFormat, String> {
    if n == 0 || k == 0 || !n.is_multiple_of(32) || !k.is_multiple_of(32) {
        return Err(format!("inputs and outputs must be multiples of 32, got {k} and {n}"));
    }
    let group = if format.group == Group::Tensor { Group::Channel } else { format.group };
    let zero = if format.zero == Zero::Float { Zero::Integer } else { format.zero };
    Ok(WeightFormat { group, zero, scale: Float::F16, channel_scale: None, ..format })
}

impl Form for Writer {
    fn specs(&self, module: &str, format: WeightFormat, [n, k]: [usize; 2]) -> Vec<TensorSpec> {
        let (bits, groups) = (format.bits as usize, format.group.count(k));
        vec![
            spec(module, "qweight", DType::I32, &[k / 32 * bits, n]),
            spec(module, "qzeros", DType::I32, &[groups, n / 32 * bits]),
            spec(module, "scales", DType::F16, &[groups, n]),
            spec(module, "g_idx", DType::I32, &[k]),
        ]
    }

    fn pack(&self, module: &str, q: &QTensor, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let GptqTensors { qweight, qzeros, scales, g_idx } = pack(module, q, self.0)?;
        put(bytemuck::cast_slice(&qweight))?;
        put(bytemuck::cast_slice(&qzeros))?;
        put(bytemuck::cast_slice(&scales))?;
        put(bytemuck::cast_slice(&g_idx))
    }

    /// The fields that GPTQModel, transformers and vLLM read. The commonest format is the model's; modules of another
    /// one, and those that stay dense, are overrides (`dynamic`, by regular expression).
    fn config(&self, model: &Settings<'_>) -> Result<Option<Value>> {
        let common = model.commonest(Fields::of).unwrap_or(Fields { bits: 4, group_size: -1, sym: true });
        let mut dynamic = Map::new();
        for Module { name, format, .. } in model.quantized {
            let own = Fields::of(format);
            if own != common {
                dynamic.insert(format!("+:{}", exactly(name)), own.to_json());
            }
        }
        for name in model.dense {
            dynamic.insert(format!("-:{}", exactly(name)), json!({}));
        }
        let mut config = json!({
            "quant_method": "gptq",
            "bits": common.bits,
            "group_size": common.group_size,
            "sym": common.sym,
            "desc_act": model.act_order,
            "lm_head": model.has_head(),
            "checkpoint_format": self.0.name(),
            "pack_dtype": "int32",
            "meta": {"quantizer": [concat!("halfbyte:", env!("CARGO_PKG_VERSION"))]},
        });
        if let (false, Value::Object(fields)) = (dynamic.is_empty(), &mut config) {
            fields.insert("dynamic".into(), Value::Object(dynamic));
        }
        Ok(Some(config))
    }
}

/// The fields that one module may have of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fields {
    bits: u32,
    group_size: i64,
    sym: bool,
}

impl Fields {
    fn of(format: &WeightFormat) -> Self {
        let group_size = match format.group {
            Group::Size(size) => i64::try_from(size).unwrap_or(i64::MAX),
            Group::Channel | Group::Tensor => -1,
        };
        Self { bits: format.bits, group_size, sym: format.zero == Zero::Symmetric }
    }

    fn to_json(self) -> Value {
        json!({"bits": self.bits, "group_size": self.group_size, "sym": self.sym})
    }
}
