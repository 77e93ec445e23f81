//! From the initialisers of a product to a quantised tensor: everything is checked before any code is unpacked.

use super::codes::unpack_row;
use super::model::MatMulNBits;
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::{DType, FloatData, cast, cast_floats};
use crate::scheme::{Description, StoredFormat, StoredModule, StoredWeight};
use halfbyte::layout::codes::Codes;
use halfbyte::layout::stored::{StoredTensor, StoredZeros, Strides};
use halfbyte::{Float, Group, WeightFormat, Zero, Zeros};
use rayon::prelude::*;
use std::path::Path;
use std::sync::Arc;

/// A tensor's bytes, and what its file says of them.
#[derive(Clone, Copy, Debug)]
pub struct TensorBytes<'a> {
    /// Type of its elements.
    pub dtype: DType,
    /// Its dimensions, outermost first.
    pub shape: &'a [usize],
    /// Its elements, little-endian, row-major.
    pub bytes: &'a [u8],
}

/// The initialisers of a product.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// Codes.
    pub weight: TensorBytes<'a>,
    /// Scales.
    pub scales: TensorBytes<'a>,
    /// Zero points, if the product has them.
    pub zero_points: Option<TensorBytes<'a>>,
    /// Block of each column, if the product has it.
    pub g_idx: Option<TensorBytes<'a>>,
}

/// What a product holds, without reading its codes and scales. Errors: those of [`load`] that do not lie in them.
pub fn describe(file: &Path, product: &MatMulNBits, blocks: &Blocks<'_>) -> Result<Description> {
    let Module { values, group_index, findings } = Parts::of(file, product, blocks)?.examine()?;
    let format = match values {
        Values::Codes(format, _) => StoredFormat::Codes(format),
        Values::Floats(_) => {
            let name = match product.bits {
                2 => "w2-float-zero-points",
                4 => "w4-float-zero-points",
                _ => "w8-float-zero-points",
            };
            StoredFormat::Floats { name, bits: product.bits, block: product.block_size }
        }
    };
    Ok(Description { format, shape: [product.n, product.k], act_order: group_index.is_some(), findings })
}

/// The weights that a product's initialisers hold, exactly, and what is odd about them.
///
/// A single block is [`Group::Channel`]; zero points that are `2^(bits−1)` throughout are none. Float zero points that
/// are integers from 0 to `2^bits` are taken as such, others as offsets `−zero · scale`, which need not be exact in the
/// type of the scales, only in f32. If one is not, the weights are floats: `(code − zero) · scale`, in f32 as onnxruntime
/// computes it. *Errors* name file and tensor: bits other than 2, 4 and 8, types or shapes that are not the operator's,
/// an index out of range, float zero points or scales that are not finite.
pub fn load<'a>(file: &Path, product: &MatMulNBits, blocks: &Blocks<'a>) -> Result<StoredModule<'a>> {
    let parts = Parts::of(file, product, blocks)?;
    let Module { values, group_index, findings } = parts.examine()?;
    let weight = match values {
        Values::Codes(format, zeros) => {
            let strides = Strides::of_outputs(parts.count);
            let zeros = match zeros {
                Zeros::Symmetric => StoredZeros::Symmetric,
                Zeros::Integer(zeros) => StoredZeros::Integer(zeros.into(), strides),
                Zeros::Float(offsets) => StoredZeros::Float(FloatData::F32(offsets.into()), strides),
            };
            let shape = [product.n, product.k];
            let tensor =
                StoredTensor::new(format, shape, parts.codes(), (parts.scales.clone(), strides), zeros, group_index);
            StoredWeight::Quantized(tensor.map_err(Error::numbers(&product.prefix))?)
        }
        Values::Floats(zeros) => parts.floats(&zeros, group_index.as_deref())?,
    };
    Ok(StoredModule { weight, findings })
}

/// A product of which everything but codes and scales has been read.
struct Module {
    values: Values,
    group_index: Option<Vec<u32>>,
    findings: Vec<Finding>,
}

/// What codes stand for.
enum Values {
    /// What a format says.
    Codes(WeightFormat, Zeros),
    /// Their distance from a float zero point, times the scale, which no format holds exactly.
    Floats(Vec<f32>),
}

/// Zero points of a product, `[n, blocks]`.
enum ZeroPoints {
    /// The middle code.
    None,
    /// From 0 to `2^bits`.
    Integer(Vec<u16>),
    /// Finite, and not all of them integers in that range.
    Float(Vec<f32>),
}

/// A product whose codes and scales have the right types and shapes.
struct Parts<'p, 'a> {
    file: &'p Path,
    product: &'p MatMulNBits,
    blocks: &'p Blocks<'a>,
    scales: FloatData<'a>,
    /// Blocks a row.
    count: usize,
    /// Bytes of codes a row.
    row_bytes: usize,
}

impl<'p, 'a> Parts<'p, 'a> {
    fn of(file: &'p Path, product: &'p MatMulNBits, blocks: &'p Blocks<'a>) -> Result<Self> {
        let &MatMulNBits { n, k, bits, block_size, .. } = product;
        let unsupported = |what: String| {
            Error::unsupported(
                file,
                format!("tensor `{}`: {what} (MatMulNBits node `{}`)", product.weight, product.node),
            )
        };
        if !matches!(bits, 2 | 4 | 8) {
            return Err(unsupported(format!("expected codes of 2, 4 or 8 bits, got {bits}")));
        }
        let overflow = || unsupported(format!("its size overflows: N {n}, K {k}, blocks of {block_size}"));
        let block_bits = block_size.checked_mul(bits as usize).ok_or_else(overflow)?;
        if n == 0 || k == 0 || block_size == 0 || block_bits % 8 != 0 {
            let what = format!("expected N and K above 0 and blocks of whole bytes, got {n}, {k} and {block_size}");
            return Err(unsupported(what));
        }
        let count = k.div_ceil(block_size);
        let row_bytes = count.checked_mul(block_bits / 8).ok_or_else(overflow)?;
        let total = n.checked_mul(row_bytes).ok_or_else(overflow)?;
        let of_blocks = n.checked_mul(count).ok_or_else(overflow)?;
        let is_float = |dtype: DType| dtype.float().is_some();
        let weight = (product.weight.as_str(), &blocks.weight);
        check(file, weight, &|dtype| dtype == DType::U8, "U8", &[&[n, count, block_bits / 8], &[total]])?;
        let scales = (product.scales.as_str(), &blocks.scales);
        check(file, scales, &is_float, "F16, BF16 or F32", &[&[n, count], &[of_blocks]])?;
        let scales = floats(&blocks.scales);
        Ok(Self { file, product, blocks, scales, count, row_bytes })
    }

    /// The codes where they are.
    fn codes(&self) -> Codes<'a> {
        let &MatMulNBits { k, bits, block_size, .. } = self.product;
        let (bytes, row_bytes) = (self.blocks.weight.bytes, self.row_bytes);
        if k.is_multiple_of(block_size) && row_bytes.is_multiple_of(4) {
            return Codes::WordsAlong(cast(bytes));
        }
        Codes::Rows(Arc::new(move |rows, codes| {
            let rows = bytes[rows.start * row_bytes..rows.end * row_bytes].chunks_exact(row_bytes);
            codes.chunks_exact_mut(k).zip(rows).for_each(|(codes, row)| unpack_row(bits, row, codes));
        }))
    }

    /// The weights as floats, their distance from a float zero point times the scale.
    fn floats(&self, zeros: &[f32], group_index: Option<&[u32]>) -> Result<StoredWeight<'static>> {
        let &MatMulNBits { n, k, bits, block_size, .. } = self.product;
        let scales = self.scales.to_f32();
        let mut floats = vec![0f32; n * k];
        floats
            .par_chunks_mut(k)
            .zip(self.blocks.weight.bytes.par_chunks(self.row_bytes))
            .zip(scales.par_chunks(self.count).zip(zeros.par_chunks(self.count)))
            .for_each_init(
                || vec![0u8; k],
                |codes, ((floats, row), (scales, zeros))| {
                    unpack_row(bits, row, codes);
                    for (j, (float, &code)) in floats.iter_mut().zip(codes.iter()).enumerate() {
                        let block = group_index.map_or(j / block_size, |index| index[j] as usize);
                        *float = (f32::from(code) - zeros[block]) * scales[block];
                    }
                },
            );
        if let Some(i) = floats.iter().position(|v| !v.is_finite()) {
            let what = format!(
                "tensor `{}`: expected scales that make finite weights, got {} in row {}, column {}",
                self.product.scales,
                floats[i],
                i / k,
                i % k
            );
            return Err(Error::malformed(self.file, what));
        }
        Ok(StoredWeight::Dense { floats: FloatData::F32(floats.into()), shape: [n, k] })
    }

    fn examine(&self) -> Result<Module> {
        let &Self { product, count, .. } = self;
        let group = if count == 1 { Group::Channel } else { Group::Size(product.block_size) };
        let mut scale = self.scales.dtype();
        let group_index = self.group_index()?;
        let mut findings = Vec::new();
        let mut find = |text: &str| findings.push(Finding::new(&product.prefix, text));
        let codes = |zero, scale, zeros| {
            Values::Codes(WeightFormat { bits: product.bits, group, zero, scale, channel_scale: None }, zeros)
        };
        let mut integer_zeros = false;
        let values = match self.zeros()? {
            ZeroPoints::None => codes(Zero::Symmetric, scale, Zeros::Symmetric),
            ZeroPoints::Integer(zeros) => {
                integer_zeros = true;
                codes(Zero::Integer, scale, Zeros::Integer(zeros))
            }
            ZeroPoints::Float(zeros) => match self.offsets(&zeros) {
                Some(offsets) => {
                    if offsets.iter().any(|&offset| scale.round(offset) != offset) {
                        scale = Float::F32;
                    }
                    codes(Zero::Float, scale, Zeros::Float(offsets))
                }
                None => {
                    find(
                        "its zero points are fractions whose products with the scales are not exact in f32; its weights \
                          were read as f32, computed as onnxruntime does",
                    );
                    Values::Floats(zeros)
                }
            },
        };
        if !product.block_size.is_power_of_two() || product.block_size < 16 {
            find("its block size is not a power of two from 16 on; other readers refuse it");
        }
        if group_index.is_some() && integer_zeros {
            find("it has both g_idx and zero points, of which some readers ignore the zero points; both were followed");
        }
        Ok(Module { values, group_index, findings })
    }

    /// The zero points, `[n, blocks]`.
    fn zeros(&self) -> Result<ZeroPoints> {
        let &Self { file, product, blocks, count, .. } = self;
        let &MatMulNBits { n, bits, .. } = product;
        let (Some(name), Some(tensor)) = (&product.zero_points, &blocks.zero_points) else {
            return Ok(ZeroPoints::None);
        };
        let zeros: Vec<u16> = if tensor.dtype == DType::U8 {
            // No longer than a row of codes, so that nothing overflows.
            let row = (count * bits as usize).div_ceil(8);
            check(file, (name, tensor), &|dtype| dtype == DType::U8, "U8", &[&[n, row], &[n * row]])?;
            let mut zeros = vec![0u8; n * count];
            let rows = zeros.chunks_exact_mut(count).zip(tensor.bytes.chunks_exact(row));
            rows.for_each(|(zeros, row)| unpack_row(bits, row, zeros));
            zeros.into_iter().map(u16::from).collect()
        } else {
            let is_float = |dtype: DType| dtype.float().is_some();
            check(file, (name, tensor), &is_float, "U8, F16, BF16 or F32", &[&[n, count], &[n * count]])?;
            let zeros = floats(tensor).to_f32();
            if let Some((at, zero)) = zeros.iter().enumerate().find(|(_, zero)| !zero.is_finite()) {
                let what = format!("tensor `{name}`: expected finite zero points, got {zero} at {at}");
                return Err(Error::malformed(file, what));
            }
            let largest = f32::from(1u16 << bits);
            if !zeros.iter().all(|&zero| zero.fract() == 0.0 && (0.0..=largest).contains(&zero)) {
                return Ok(ZeroPoints::Float(zeros));
            }
            zeros.into_iter().map(|zero| zero as u16).collect()
        };
        let middle = 1u16 << (bits - 1);
        Ok(if zeros.iter().all(|&zero| zero == middle) { ZeroPoints::None } else { ZeroPoints::Integer(zeros) })
    }

    /// Float zero points as offsets `−zero · scale`; None if one of those is not exact in f32.
    fn offsets(&self, zeros: &[f32]) -> Option<Vec<f32>> {
        let scales = self.scales.to_f32();
        let offset = |(&zero, &scale): (&f32, &f32)| {
            // The product of two singles is exact in a double.
            let exact = -f64::from(zero) * f64::from(scale);
            let offset = exact as f32;
            (f64::from(offset) == exact || !scale.is_finite()).then_some(offset)
        };
        zeros.iter().zip(&scales).map(offset).collect()
    }

    /// The block of each column, if that is not simply `j / block_size`.
    fn group_index(&self) -> Result<Option<Vec<u32>>> {
        let &Self { file, product, blocks, count, .. } = self;
        let &MatMulNBits { k, block_size, .. } = product;
        let (Some(name), Some(tensor)) = (&product.g_idx, &blocks.g_idx) else { return Ok(None) };
        // A row of codes holds as many, so that nothing overflows.
        check(file, (name, tensor), &|dtype| dtype == DType::I32, "I32", &[&[k], &[count * block_size]])?;
        let index = cast::<i32>(tensor.bytes);
        let index = &index[..k];
        if let Some((j, block)) = index.iter().enumerate().find(|&(_, &b)| b < 0 || b as usize >= count) {
            let what = format!("tensor `{name}`: expected blocks from 0 to {}, got {block} at {j}", count - 1);
            return Err(Error::malformed(file, what));
        }
        let trivial = index.iter().enumerate().all(|(j, &block)| block as usize == j / block_size);
        Ok((!trivial).then(|| index.iter().map(|&block| block as u32).collect()))
    }
}

/// Checks that a tensor has a type, one of these shapes, and the bytes for it.
fn check(
    file: &Path,
    (name, tensor): (&str, &TensorBytes<'_>),
    fits: &dyn Fn(DType) -> bool,
    types: &str,
    shapes: &[&[usize]],
) -> Result<()> {
    let bytes = tensor.dtype.bytes_of(tensor.shape);
    if !fits(tensor.dtype) || !shapes.contains(&tensor.shape) {
        let [first, rest @ ..] = shapes else { return Ok(()) };
        let others: String = rest.iter().map(|shape| format!(" or {shape:?}")).collect();
        let what =
            format!("tensor `{name}`: expected {types} {first:?}{others}, got {} {:?}", tensor.dtype, tensor.shape);
        return Err(Error::malformed(file, what));
    }
    if bytes != Some(tensor.bytes.len()) {
        let what = format!(
            "tensor `{name}`: expected {} bytes for {} {:?}, got {}",
            bytes.unwrap_or_default(),
            tensor.dtype,
            tensor.shape,
            tensor.bytes.len()
        );
        return Err(Error::malformed(file, what));
    }
    Ok(())
}

/// The elements of a tensor that was found to be one of floats.
fn floats<'a>(tensor: &TensorBytes<'a>) -> FloatData<'a> {
    cast_floats(tensor.dtype.float().unwrap_or(Float::F32), tensor.bytes)
}
