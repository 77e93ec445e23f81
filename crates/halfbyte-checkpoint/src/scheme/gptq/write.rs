//! Writing GPTQ modules, and the config that goes with them.

use super::read::transposed;
use super::stream;
use crate::config::GptqVersion;
use crate::error::{Error, Result};
use crate::safetensors::{DType, TensorSpec};
use half::f16;
use halfbyte::{Group, QTensor, WeightFormat, Zero, Zeros};
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

impl GptqTensors {
    /// The tensors' bytes by the endings of their names, in the order of [`specs`].
    pub(crate) fn parts(&self) -> [(&'static str, &[u8]); 4] {
        [
            ("qweight", bytemuck::cast_slice(&self.qweight)),
            ("qzeros", bytemuck::cast_slice(&self.qzeros)),
            ("scales", bytemuck::cast_slice(&self.scales)),
            ("g_idx", bytemuck::cast_slice(&self.g_idx)),
        ]
    }
}

fn refuse<T>(tensor: &str, reason: String) -> Result<T> {
    Err(Error::Unrepresentable { tensor: tensor.to_owned(), scheme: "gptq", reason })
}

/// Whether GPTQ files can hold a module of this format and shape `[n, k]`, as far as these tell.
fn check(name: &str, format: WeightFormat, [n, k]: [usize; 2]) -> Result<()> {
    format.validate().map_err(Error::numbers(name))?;
    if format.zero == Zero::Float {
        return refuse(name, "it has integer zero points only, no float offsets".into());
    }
    if n == 0 || k == 0 || !n.is_multiple_of(32) || !k.is_multiple_of(32) {
        return refuse(name, format!("inputs and outputs must be multiples of 32, got {k} and {n}"));
    }
    Ok(())
}

/// The tensors that a module of this format and shape `[n, k]` becomes. Errors: those of [`check`].
pub(crate) fn specs(name: &str, format: WeightFormat, [n, k]: [usize; 2]) -> Result<Vec<TensorSpec>> {
    check(name, format, [n, k])?;
    let (bits, groups) = (format.bits as usize, format.group.count(k));
    let spec = |part: &str, dtype, shape: &[usize]| TensorSpec {
        name: format!("{name}.{part}"),
        dtype,
        shape: shape.to_vec(),
    };
    Ok(vec![
        spec("qweight", DType::I32, &[k / 32 * bits, n]),
        spec("qzeros", DType::I32, &[groups, n / 32 * bits]),
        spec("scales", DType::F16, &[groups, n]),
        spec("g_idx", DType::I32, &[k]),
    ])
}

/// Packs a tensor as GPTQ does, without loss.
///
/// *Errors:* what GPTQ files cannot hold: float offsets, n or k not a multiple of 32, scales that are not exact in f16, a
/// zero point of 0 in `gptq` (which stores it less one) or of `2^bits` in `gptq_v2`.
pub fn pack(name: &str, q: &QTensor, version: GptqVersion) -> Result<GptqTensors> {
    let format = q.format();
    let (n, k, groups, bits) = (q.n(), q.k(), q.groups(), format.bits);
    check(name, format, [n, k])?;
    let scales: Vec<f16> = q.scales().iter().map(|&s| f16::from_f32(s)).collect();
    if let Some((narrow, wide)) = scales.iter().zip(q.scales()).find(|(narrow, wide)| narrow.to_f32() != **wide) {
        return refuse(name, format!("its scales are f16, and {wide} is not exact in it (nearest: {narrow})"));
    }
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
                        return refuse(name, format!("zero points of {} go from {range}, got {zero}", version.name()));
                    }
                }
            }
            stored
        }
        Zeros::Float(_) => return refuse(name, "it has integer zero points only, no float offsets".into()),
    };
    Ok(GptqTensors {
        qweight: stream::pack_columns(q.codes(), bits, [n, k]),
        qzeros: stream::pack_rows(&transposed(&zeros, n, groups), bits),
        scales: transposed(&scales, n, groups),
        g_idx: (0..k).map(|j| q.group_of(j) as i32).collect(),
    })
}

/// What `quantization_config` has to say of a whole model.
#[derive(Debug)]
pub(crate) struct Settings<'a> {
    pub version: GptqVersion,
    /// Every quantised module with its format.
    pub quantized: &'a [(String, WeightFormat)],
    /// Modules inside the repeated blocks that stay dense.
    pub dense: &'a [String],
    /// Whether any module was quantised in another order of columns.
    pub act_order: bool,
}

impl Settings<'_> {
    /// The object, with the fields that GPTQModel, transformers and vLLM read. The commonest format is the model's;
    /// modules of another one, and those that stay dense, are overrides (`dynamic`, by regular expression).
    pub fn to_json(&self) -> Value {
        let mut formats: Vec<(Fields, usize)> = Vec::new();
        for (_, format) in self.quantized {
            let fields = Fields::of(format);
            match formats.iter_mut().find(|(known, _)| *known == fields) {
                Some((_, count)) => *count += 1,
                None => formats.push((fields, 1)),
            }
        }
        // The first of equally common ones, so that the same model gives the same file.
        let common = formats
            .iter()
            .rev()
            .max_by_key(|(_, count)| *count)
            .map_or(Fields { bits: 4, group_size: -1, sym: true }, |f| f.0);
        let mut dynamic = Map::new();
        for (name, format) in self.quantized {
            let own = Fields::of(format);
            if own != common {
                dynamic.insert(format!("+:{}", exactly(name)), own.to_json());
            }
        }
        for name in self.dense {
            dynamic.insert(format!("-:{}", exactly(name)), json!({}));
        }
        let mut config = json!({
            "quant_method": "gptq",
            "bits": common.bits,
            "group_size": common.group_size,
            "sym": common.sym,
            "desc_act": self.act_order,
            "lm_head": self.quantized.iter().any(|(name, _)| name == "lm_head" || name.ends_with(".lm_head")),
            "checkpoint_format": self.version.name(),
            "pack_dtype": "int32",
            "meta": {"quantizer": [concat!("halfbyte:", env!("CARGO_PKG_VERSION"))]},
        });
        if let (false, Value::Object(fields)) = (dynamic.is_empty(), &mut config) {
            fields.insert("dynamic".into(), Value::Object(dynamic));
        }
        config
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

/// A regular expression that matches this module's name alone.
fn exactly(name: &str) -> String {
    let mut pattern = String::from("^");
    for c in name.chars() {
        if !c.is_ascii_alphanumeric() && c != '_' {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern.push('$');
    pattern
}
