//! Writing modules under TensorRT-LLM's names, and the config that goes with them.

use crate::error::{Error, Result};
use crate::safetensors::{DType, TensorSpec};
use crate::scheme::awq::transposed;
use crate::target::{Form, Module, Settings, floats, spec, unrepresentable};
use halfbyte::layout::codes::FpaIntB;
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero, Zeros};
use serde_json::{Value, json};

/// Writes this form in a layout.
pub(crate) struct Writer(pub FpaIntB);

/// The format nearest to this one that a module of this shape can have. Error: why there is none.
pub(crate) fn nearest(
    layout: FpaIntB,
    format: WeightFormat,
    [n, k]: [usize; 2],
) -> std::result::Result<WeightFormat, String> {
    let bits = if format.bits == 8 { 8 } else { 4 };
    if n == 0 || k == 0 || !n.is_multiple_of(16) || !k.is_multiple_of(64) {
        return Err(format!("outputs must be a multiple of 16 and inputs of 64, got {n} and {k}"));
    }
    layout.bytes([n, k], bits).map_err(|why| why.to_string())?;
    let group = if format.group == Group::Tensor { Group::Channel } else { format.group };
    let zero = match (group, format.zero) {
        // Zeros come with groups only.
        (Group::Size(_), Zero::Integer | Zero::Float) => Zero::Integer,
        _ => Zero::Symmetric,
    };
    let scale = if format.scale == Float::F32 { Float::F16 } else { format.scale };
    Ok(WeightFormat { bits, group, zero, scale, channel_scale: None })
}

impl Form for Writer {
    fn specs(&self, module: &str, format: WeightFormat, [n, k]: [usize; 2]) -> Vec<TensorSpec> {
        let (scale, bytes) = (DType::from(format.scale), n * format.bits as usize / 8);
        let Group::Size(_) = format.group else {
            return vec![
                spec(module, "weight", DType::I8, &[k, bytes]),
                spec(module, "per_channel_scale", scale, &[n]),
            ];
        };
        let groups = format.group.count(k);
        let mut specs = vec![
            spec(module, "weight", scale, &[k, bytes / 2]),
            spec(module, "weights_scaling_factor", scale, &[groups, n]),
        ];
        if format.zero == Zero::Integer {
            specs.push(spec(module, "zero", scale, &[groups, n]));
        }
        specs
    }

    fn pack(&self, module: &str, q: &QTensor, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let (format, n, k, groups) = (q.format(), q.n(), q.k(), q.groups());
        let refuse = unrepresentable(module, "fpa_intb");
        if q.group_index().is_some() {
            return Err(refuse("it has no group index, so no act-order".into()));
        }
        put(&self.0.pack(q.codes(), [n, k], format.bits).map_err(Error::numbers(module))?)?;
        let scales = transposed(q.scales(), n, groups);
        floats(&scales, format.scale, put)?;
        let points = match q.zeros() {
            Zeros::Symmetric => return Ok(()),
            Zeros::Integer(points) => transposed(points, n, groups),
            Zeros::Float(_) => return Err(refuse("it has integer zero points only, no float offsets".into())),
        };
        let middle = format.middle() as f32;
        let zero = |(&point, &scale): (&u16, &f32)| format.scale.round((middle - f32::from(point)) * scale);
        let zeros: Vec<f32> = points.iter().zip(&scales).map(zero).collect();
        // A zero beyond the scale's type, or so small that it is rounded to another one's, would be read as another.
        let again = |scale: f32, zero: f32| if scale == 0.0 { middle } else { (middle - zero / scale).round() };
        let lost = points.iter().zip(&scales).zip(&zeros).find(|((point, scale), zero)| {
            **scale != 0.0 && again(**scale, **zero) != f32::from(**point) || !zero.is_finite()
        });
        if let Some(((point, scale), _)) = lost {
            let what =
                format!("zero points times scales in {}: {point} and {scale} do not come back from it", format.scale);
            return Err(refuse(what));
        }
        floats(&zeros, format.scale, put)
    }

    /// The fields of TensorRT-LLM's `QuantConfig`, with the method and the architecture, which it does not have.
    fn config(&self, model: &Settings<'_>) -> Result<Option<Value>> {
        let group_of = |format: &WeightFormat| match format.group {
            Group::Size(size) => i64::try_from(size).unwrap_or(i64::MAX),
            Group::Channel | Group::Tensor => -1,
        };
        let group_size = model.commonest(group_of).unwrap_or(-1);
        if let Some(Module { name, format, .. }) = model.quantized.iter().find(|m| group_of(&m.format) != group_size) {
            let got = format!("{} in `{name}`, {group_size} elsewhere", group_of(format));
            return Err(Error::invalid("write fpa_intb", "one group size for the whole model", got));
        }
        let bits = model.commonest(|format| format.bits).unwrap_or(4);
        let grouped = if group_size == -1 { "" } else { "_GPTQ" };
        let has_head = model.has_head();
        let exclude: Vec<&str> =
            model.dense.iter().map(String::as_str).chain((!has_head).then_some("lm_head")).collect();
        Ok(Some(json!({
            "quant_method": "fpa_intb",
            "quant_algo": format!("W{bits}A16{grouped}"),
            "arch": if self.0 == FpaIntB::RowMajor { 70 } else { 80 },
            "group_size": group_size,
            "has_zero_point": model.quantized.iter().any(|module| module.format.zero == Zero::Integer),
            "exclude_modules": exclude,
        })))
    }
}
