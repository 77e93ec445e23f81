//! Keys and values of past positions, on a device: floats, or codes of 8 bits with scales.

use super::attention::LARGEST_HEAD;
use super::floats::FloatBuffer;
use super::narrow;
use crate::cuda::Gpu;
use crate::cuda::driver::{Buffer, FloatView, Promotion, Stream, Swizzle, TensorMap, Tiles, View};
use crate::cuda::parameters::float_type;
use crate::cuda::sources::Arch;
use crate::error::{Error, Result};
use crate::kernel::{Heads, KvType};
use crate::kv_pages::PAGE_LENGTH;
use crate::tensor::Float;
use std::ops::Range;

/// Keys, or values, of some heads.
#[derive(Clone, Copy, Debug)]
pub enum KvView<'a> {
    /// `[heads][capacity][head_size]`.
    Floats(FloatView<'a>),
    /// Codes of 8 bits, each of which stands for itself times its position's scale ([`KvType::Int8`]).
    Codes {
        /// `[heads][capacity][head_size]`.
        codes: View<'a, i8>,
        /// `[heads][capacity]`.
        scales: View<'a, f32>,
    },
}

impl KvView<'_> {
    /// Address of the elements.
    pub(super) fn pointer(&self) -> u64 {
        match self {
            Self::Floats(floats) => floats.pointer(),
            Self::Codes { codes, .. } => codes.pointer(),
        }
    }

    /// Address of the scales; 0 where there are none.
    pub(super) fn scales(&self) -> u64 {
        match self {
            Self::Floats(_) => 0,
            Self::Codes { scales, .. } => scales.pointer(),
        }
    }
}

/// The keys, or the values, of all layers.
#[derive(Debug)]
enum Stored {
    Floats(FloatBuffer),
    Codes { codes: Buffer<i8>, scales: Buffer<f32> },
}

impl Stored {
    /// For so many vectors of `size` elements; `len` elements in all.
    fn allocate(gpu: &Gpu, kv: KvType, vectors: usize, len: usize) -> Result<Self> {
        let dtype = match kv {
            KvType::F32 => Float::F32,
            KvType::F16 => Float::F16,
            KvType::Bf16 => Float::BF16,
            KvType::Int8 => {
                let context = gpu.context();
                return Ok(Self::Codes { codes: context.allocate(len)?, scales: context.allocate(vectors)? });
            }
        };
        Ok(Self::Floats(FloatBuffer::allocate(gpu, dtype, len)?))
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Floats(floats) => floats.bytes(),
            Self::Codes { codes, scales } => codes.bytes() + scales.bytes(),
        }
    }

    /// Vectors of `size` elements.
    fn view(&self, vectors: Range<usize>, size: usize) -> KvView<'_> {
        let elements = vectors.start * size..vectors.end * size;
        match self {
            Self::Floats(floats) => KvView::Floats(floats.view(elements)),
            Self::Codes { codes, scales } => {
                KvView::Codes { codes: codes.view().slice(elements), scales: scales.view().slice(vectors) }
            }
        }
    }

    /// Copies vectors of `size` elements to where others lie.
    fn copy_within(&mut self, stream: &Stream, vectors: Range<usize>, to: usize, size: usize) -> Result<()> {
        let elements = vectors.start * size..vectors.end * size;
        match self {
            Self::Floats(floats) => floats.copy_within(stream, elements, to * size),
            Self::Codes { codes, scales } => {
                codes.copy_within(stream, elements, to * size)?;
                scales.copy_within(stream, vectors, to)
            }
        }
    }
}

/// The keys and values of all layers, on a device.
///
/// For each layer the keys `[kv_heads][capacity][head_size]`, and the values likewise. A text that has the cache for itself lies there in
/// order; of several each has pages of [`PAGE_LENGTH`] positions, which a table names ([`super::Attention::pages`]).
#[derive(Debug)]
pub struct KvCache {
    keys: Stored,
    values: Stored,
    layers: usize,
    heads: Heads,
    capacity: usize,
    kv: KvType,
}

impl KvCache {
    /// Memory for `capacity` positions. *Errors:* heads that make no sense or are larger than [`LARGEST_HEAD`], sizes
    /// beyond the address space, memory that is short.
    pub fn new(gpu: &Gpu, layers: usize, heads: Heads, capacity: usize, kv: KvType) -> Result<Self> {
        const OP: &str = "kv cache";
        let heads = heads.checked(OP)?;
        if heads.head_size > LARGEST_HEAD {
            let expected = format!("heads of at most {LARGEST_HEAD} elements");
            return Err(Error::invalid(OP, expected, heads.head_size.to_string()));
        }
        narrow(OP, "positions", capacity)?;
        let sizes = [heads.kv_heads, capacity, heads.head_size];
        let len = sizes.iter().try_fold(layers, |len, &n| len.checked_mul(n));
        let len = len.ok_or_else(|| Error::invalid(OP, "a size that fits memory", format!("{layers} × {sizes:?}")))?;
        let stored = || Stored::allocate(gpu, kv, len / heads.head_size, len);
        Ok(Self { keys: stored()?, values: stored()?, layers, heads, capacity, kv })
    }

    /// The heads that it is for.
    pub fn heads(&self) -> Heads {
        self.heads
    }

    /// Positions that it has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The type that keys and values lie in.
    pub fn kv(&self) -> KvType {
        self.kv
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }

    /// Copies a page to another, in all layers. *Errors:* there are not so many pages.
    pub fn copy_page(&mut self, stream: &Stream, from: usize, to: usize) -> Result<()> {
        let Self { keys, values, layers, heads, capacity, .. } = self;
        let pages = *capacity / PAGE_LENGTH;
        if from >= pages || to >= pages {
            return Err(Error::invalid("kv cache", format!("pages below {pages}"), format!("{from} and {to}")));
        }
        for of_head in 0..*layers * heads.kv_heads {
            let [from, to] = [from, to].map(|page| of_head * *capacity + page * PAGE_LENGTH);
            for all in [&mut *keys, &mut *values] {
                all.copy_within(stream, from..from + PAGE_LENGTH, to, heads.head_size)?;
            }
        }
        Ok(())
    }

    /// Keys and values of all layers as matrices of floats, a row for each position of a key head, in boxes of so many rows and 64 elements
    /// that the copy engine takes. Error, which names `op`: codes.
    pub(super) fn maps(&self, op: &'static str, rows: usize) -> Result<[TensorMap; 2]> {
        let all = 0..self.layers * self.heads.kv_heads * self.capacity;
        self.maps_of([&self.keys, &self.values].map(|stored| stored.view(all.clone(), self.heads.head_size)), op, rows)
    }

    /// The same of a layer.
    pub(super) fn maps_of_layer(&self, op: &'static str, layer: usize, rows: usize) -> Result<[TensorMap; 2]> {
        self.maps_of(self.layer(op, layer)?, op, rows)
    }

    fn maps_of(&self, [keys, values]: [KvView<'_>; 2], op: &'static str, rows: usize) -> Result<[TensorMap; 2]> {
        let size = self.heads.head_size;
        let tile = [narrow(op, "rows", rows)?, 64];
        let map = |all: KvView<'_>| {
            let KvView::Floats(all) = all else { return Err(Error::invalid(op, "keys and values in floats", "codes")) };
            let shape = [all.len() / size, size];
            if i32::try_from(shape[0]).is_err() {
                return Err(Error::invalid(op, "rows that the copy engine counts, below 2³¹", shape[0].to_string()));
            }
            let tiles =
                Tiles { shape, stride: size, tile, swizzle: Swizzle::Bytes128, promotion: Promotion::default() };
            TensorMap::of_matrix(all, &tiles)
        };
        Ok([map(keys)?, map(values)?])
    }

    /// Keys and values of a layer, each `[kv_heads, capacity, head_size]`. Error, which names `op`: there is none.
    pub fn layer(&self, op: &'static str, layer: usize) -> Result<[KvView<'_>; 2]> {
        if layer >= self.layers {
            return Err(Error::invalid(op, format!("a layer below {}", self.layers), layer.to_string()));
        }
        let vectors = self.heads.kv_heads * self.capacity;
        let of_layer = layer * vectors..(layer + 1) * vectors;
        Ok([&self.keys, &self.values].map(|all| all.view(of_layer.clone(), self.heads.head_size)))
    }
}

/// As `FloatType` in `include/floats.cuh`; of codes, which have scales, whatever.
pub(super) fn element_type(kv: KvType) -> u32 {
    match kv {
        KvType::F16 | KvType::Int8 => float_type(Float::F16),
        KvType::Bf16 => float_type(Float::BF16),
        KvType::F32 => float_type(Float::F32),
    }
}

/// Whether a processor's tensor cores multiply a type: of codes weights become bf16.
pub(super) fn multiplies(arch: Arch, kv: KvType) -> bool {
    match kv {
        KvType::F16 => arch.multiplies(Float::F16),
        KvType::Bf16 | KvType::Int8 => arch.multiplies(Float::BF16),
        KvType::F32 => false,
    }
}

/// As `KvType` in `include/attention.cuh`, for the kernels on tensor cores; none: they do not take it.
pub(super) fn on_tensor_cores(kv: KvType) -> Option<&'static str> {
    match kv {
        KvType::F16 => Some("HALVES"),
        KvType::Bf16 => Some("BFLOATS"),
        KvType::Int8 => Some("CODES"),
        KvType::F32 => None,
    }
}
