//! Launches of `pack.cu`: from the words of files to the layouts of the kernels, on the device.
//!
//! ```text
//! scales and zeros go up as they are
//! for each slab of rows:
//!     its codes go up as they are, by way of pinned memory
//!     a kernel writes the layout
//! ```
//!
//! Codes that only a function knows ([`Codes::Rows`]) are unpacked to bytes on their way to pinned memory; random ones are drawn by
//! the kernel, and nothing of them goes up. The result is that
//! of [`CudaWna16::pack`](crate::layout::cuda_wna16::CudaWna16::pack) and of
//! [`CudaPlain::pack`](crate::layout::cuda_plain::CudaPlain::pack), bit for bit.

mod whole;

pub(super) use whole::Whole;

use super::simt::zero_kind;
use super::staged::{aligned, bytes_of, bytes_of_rows, copy, copy_lines, params_of};
use super::wna16::Weights;
use super::{KERNELS, Kernel, Packed};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Buffer, Launch, Sent, Stream, Uploader};
use crate::cuda::nn::{FloatBuffer, Gate};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::format::{Act, Format};
use crate::kernel::{self as table, Problem};
use crate::layout::codes::{self, BlockForm, Codes, NIBBLES, field_bits};
use crate::layout::cuda_wna16::Atom;
use crate::layout::multiples::Multiples;
use crate::layout::stored::{StoredTensor, StoredZeros};
use crate::tensor::{Float, Floats};
use bytemuck::{Pod, cast, cast_slice};
use rayon::prelude::*;
use std::ops::Range;
use whole::EIGHT;

static SOURCE: Source =
    Source { path: "matmul/pack.cu", text: include_str!("pack.cu"), parameters: &[Part::LAYOUT, Params::LAYOUT] };

const OP: &str = "pack";

/// As in the source: outputs and threads of a block.
const OUTPUTS: usize = 64;
const THREADS: u32 = 256;

/// Rows that begin a slab: in `cuda_wna16` their atoms lie together.
const SLAB_ROWS: usize = 256;

/// What the codes of a slab take on the device.
const SLAB_BYTES: usize = 64 << 20;

pub(super) fn instances() -> Vec<Instance> {
    let forms = [(2, 2), (3, 4), (4, 4), (4, 8), (5, 8), (6, 8), (8, 8)]
        .into_iter()
        .flat_map(|(bits, field)| [(bits, false, field), (bits, true, field)]);
    let forms = forms.filter(|&(bits, gated, _)| bits != 6 || !gated);
    let atoms = forms.map(|(bits, gated, field)| format!("wna16<{bits}, {gated}, {field}>"));
    let fields = [2, 4, 8].into_iter().flat_map(|field| [format!("plain<{field}>"), format!("values<{field}>")]);
    let others = ["wna16_rows", "wna16_multiples", "plain_params"].map(str::to_owned);
    atoms.chain(fields).chain(others).map(|name| Instance::new(&SOURCE, name)).collect()
}

/// Packs weights, with the memory that it takes: pinned and on the device, kept until it is dropped.
#[derive(Debug)]
pub struct Packer<'a> {
    gpu: &'a Gpu,
    stream: &'a Stream,
    uploader: Uploader,
    staging: Option<Buffer<u8>>,
    slab_bytes: usize,
}

parameters! {
    /// As in the source.
    struct Fields {
        at: u32,
        run: u32,
        bits: u32,
    }

    /// Rows of a tensor, as in the source.
    struct Part {
        codes: u64,
        stride: u64,
        scales: u64,
        scale_output: u64,
        scale_group: u64,
        zeros: u64,
        zero_output: u64,
        zero_group: u64,
        channels: u64,
        offset_halves: u64,
        top: u32,
        rows: u32,
        kind: u32,
        flip: u32,
        scale_type: u32,
        offset_type: u32,
        block_codes: u32,
        block_bytes: u32,
        low: Fields,
        high: Fields,
        add: u32,
        block: u32,
        scale_sign: i32,
        offset_sign: i32,
        table: [u32; 4],
    }

    /// As in the source.
    struct Params {
        parts: u64,
        order: u64,
        codes: u64,
        scales: u64,
        zeros: u64,
        n: u32,
        k: u32,
        groups: u32,
        first: u32,
        count: u32,
        group: u32,
        atom_group: u32,
        middle: u32,
        scale_type: u32,
        zero_kind: u32,
        factors: u32,
        gated: u32,
        raised: u32,
        atom_bits: u32,
        multiples: u32,
        padding: u32,
    }
}

/// Where a layout lies, as addresses on the device.
pub(super) enum Target {
    /// Layout `cuda_wna16`: the form of its atoms, where they lie, scales of rows, the order of columns or 0.
    Wna16 { atom: Atom, atoms: u64, rows: u64, order: u64 },
    /// Layout `cuda_plain`.
    Plain { codes: u64, scales: u64, zeros: u64 },
    /// What codes stand for; the group of each column, or 0.
    Values { out: u64, group_index: u64 },
}

impl<'a> Packer<'a> {
    /// Takes memory when it is first used.
    pub fn new(gpu: &'a Gpu, stream: &'a Stream) -> Self {
        Self { gpu, stream, uploader: Uploader::new(gpu.context()), staging: None, slab_bytes: SLAB_BYTES }
    }

    /// The stream that it packs in.
    pub fn stream(&self) -> &'a Stream {
        self.stream
    }

    /// The same with at most so many bytes of unpacked codes on the device, but no fewer than those of 256 rows.
    pub fn with_slab_bytes(self, slab_bytes: usize) -> Self {
        Self { slab_bytes, ..self }
    }

    /// Packs tensors one below the other for the kernel that serves them best; `x` is the type that activations will have.
    ///
    /// Errors: no tensor; tensors that differ in format, k or group index; no kernel serves the format; memory is short.
    pub fn pack(&mut self, parts: &[&StoredTensor<'_>], act: Act, x: Float) -> Result<Packed> {
        let whole = Whole::of(parts)?;
        let format = Format { weight: whole.format, act };
        let problem = Problem { format: Some(format), x, y: x, m: 1, n: whole.n, k: whole.k };
        let packing = KERNELS.iter().filter(|kernel| kernel.packs);
        let kernel = table::first(OP, &problem, packing, |kernel| {
            let held = || parts.iter().try_for_each(|part| kernel.holds(part, act));
            kernel.supports(&self.gpu.caps(), &problem).and_then(|()| held()).map(|()| kernel)
        })?;
        self.pack_for(kernel, parts, act)
    }

    /// The same in the layout of a kernel of the caller's choice. Error also: the layout does not hold the numbers.
    pub fn pack_for(&mut self, kernel: &Kernel, parts: &[&StoredTensor<'_>], act: Act) -> Result<Packed> {
        (kernel.pack)(self, Whole::of(parts)?.checked()?, parts, act)
    }

    /// Packs gates and what they let through for products that leave `f(gate) · up`: of each sixteen rows eight are of the one, eight of
    /// the other.
    ///
    /// Errors: tensors that differ in shape, format or group index; outputs that eight does not divide; no such product has a kernel
    /// for the format; a function without a gate; memory is short.
    pub fn pack_gated(&mut self, [gate, up]: [&StoredTensor<'_>; 2], act: Act, function: Gate) -> Result<Packed> {
        let (parts, whole) = ([gate, up], Whole::of(&[gate, up])?.checked()?);
        if gate.n() != up.n() || !gate.n().is_multiple_of(EIGHT) {
            let expected = "gates, and as many others, a multiple of 8";
            return Err(Error::invalid(OP, expected, format!("{} and {}", gate.n(), up.n())));
        }
        if !function.gated {
            return Err(Error::invalid(OP, "the function of a gate", format!("{function:?}")));
        }
        Ok(Packed::Wna16(Weights::new(self, Whole { gate: Some(function), ..whole }, &parts, act)?))
    }

    /// What the codes of a tensor stand for, `[n, k]`, each rounded to f32 once.
    ///
    /// Errors: a code beyond the format's bits, more rows or columns than 2³¹, memory is short.
    pub fn values(&mut self, w: &StoredTensor<'_>) -> Result<Buffer<f32>> {
        let whole = Whole::of(&[w])?.checked()?;
        let index = w.group_index().map(|index| self.upload(index)).transpose()?;
        let out = self.allocate(whole.n * whole.k)?;
        let target = Target::Values { out: out.pointer(), group_index: index.as_ref().map_or(0, Buffer::pointer) };
        self.write(whole, &[w], &target)?;
        Ok(out)
    }

    /// Matrices of floats of one type, one below the other. Errors: none, or of several types; memory is short.
    pub fn floats(&mut self, parts: &[Floats<'_>]) -> Result<FloatBuffer> {
        let dtype = parts.first().map(Floats::dtype);
        let dtype = dtype.filter(|&dtype| parts.iter().all(|part| part.dtype() == dtype));
        let dtype = dtype.ok_or_else(|| Error::invalid(OP, "floats of one type", "none, or several"))?;
        let mut out = FloatBuffer::allocate(self.gpu, dtype, parts.iter().map(Floats::len).sum())?;
        let mut first = 0;
        for part in parts {
            let (bytes, to) = (bytes_of(*part), out.view_mut(first..first + part.len()).into_bytes());
            self.uploader.upload(self.stream, to, 1, |range, to| copy(bytes, range, to))?;
            first += part.len();
        }
        self.uploader.finish(self.stream)?;
        Ok(out)
    }

    /// What it has brought to the device so far.
    pub fn sent(&self) -> Sent {
        self.uploader.sent()
    }

    /// Memory of the device that stays.
    pub(super) fn allocate<T: Pod>(&self, len: usize) -> Result<Buffer<T>> {
        self.gpu.context().allocate(len)
    }

    /// The same of floats of a type.
    pub(super) fn allocate_floats(&self, dtype: Float, len: usize) -> Result<FloatBuffer> {
        FloatBuffer::allocate(self.gpu, dtype, len)
    }

    /// Values on the device.
    pub(super) fn upload<T: Pod>(&self, values: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.allocate(values.len())?;
        self.stream.upload(values, buffer.view_mut())?;
        Ok(buffer)
    }

    /// Writes a layout, and waits for it.
    pub(super) fn write(&mut self, whole: Whole, parts: &[&StoredTensor<'_>], target: &Target) -> Result<()> {
        let atom = if let Target::Wna16 { atom, .. } = target { Some(*atom) } else { None };
        let multiples = atom.is_some_and(|atom| atom.multiples);
        let heights: Vec<usize> = parts.iter().map(|part| part.n()).collect();
        let row_bytes = parts.iter().map(|part| bytes_of_rows(part, NIBBLES)).max().unwrap_or(0).div_ceil(NIBBLES);
        let rows = (self.slab_bytes / row_bytes.max(1) / SLAB_ROWS).max(1) * SLAB_ROWS;
        let slabs: Vec<Range<usize>> =
            (0..whole.n).step_by(rows).map(|first| first..whole.n.min(first.saturating_add(rows))).collect();
        let slab_bytes = |slab: &Range<usize>| -> usize {
            let codes = |[part, .., rows]: [usize; 4]| aligned(bytes_of_rows(parts[part], rows));
            whole.runs(&heights, slab.clone()).into_iter().map(codes).sum()
        };
        let table_bytes = aligned(parts.len() * size_of::<Part>());
        let params_bytes: usize =
            parts.iter().flat_map(|part| params_of(part, multiples)).map(|(v, _)| aligned(v.len())).sum();
        let codes_bytes = slabs.iter().map(slab_bytes).max().unwrap_or(0);
        let needed = table_bytes + params_bytes + codes_bytes;
        let mut staging = match self.staging.take().filter(|staging| staging.len() >= needed) {
            Some(staging) => staging,
            None => self.allocate(needed)?,
        };
        let mut free = table_bytes;
        let mut params = Vec::with_capacity(parts.len());
        for part in parts {
            let mut addresses = [0; 4];
            for (address, (values, _)) in addresses.iter_mut().zip(params_of(part, multiples)) {
                *address = self.stage(&mut staging, &mut free, values.len(), 1, |range, to| copy(values, range, to))?;
            }
            params.push(addresses);
        }
        let first_of_codes = free;
        for slab in slabs {
            free = first_of_codes;
            let mut table = Vec::with_capacity(parts.len());
            for [part, first, top, rows] in whole.runs(&heights, slab.clone()) {
                let place = ([top, first, rows], atom);
                table.push(self.part(&mut staging, &mut free, parts[part], place, params[part])?);
            }
            let bytes: &[u8] = cast_slice(&table);
            self.stage(&mut staging, &mut 0, bytes.len(), 1, |range, to| copy(bytes, range, to))?;
            self.launch(whole, slab, &table, staging.pointer(), target)?;
        }
        self.staging = Some(staging);
        self.uploader.finish(self.stream)
    }

    /// Codes of some rows of a tensor, put on the device: `rows` from its own row `first` on, which are from `top` on in the
    /// packed matrix.
    fn part(
        &mut self,
        staging: &mut Buffer<u8>,
        free: &mut usize,
        tensor: &StoredTensor<'_>,
        ([top, first, rows], atom): ([usize; 3], Option<Atom>),
        addresses: [u64; 4],
    ) -> Result<Part> {
        let (n, k, format) = (tensor.n(), tensor.k(), tensor.format());
        let per_word = 32 / format.bits as usize;
        let multiples = atom.is_some_and(|atom| atom.multiples);
        // Numbers of a table stand for themselves in atoms that have them, or for the first that has the same code.
        let table = |table: [u8; 16]| match atom.filter(|atom| atom.table.is_some()) {
            Some(atom) => table.map(|code| atom.number_of(code, 0) as u8),
            None => table,
        };
        let bytes = bytes_of_rows(tensor, rows);
        let mut lines = |all: &[u8], pitch: usize, first: usize, width: usize| {
            self.stage(staging, free, bytes, 1, |range, to| copy_lines(all, pitch, first, width, range, to))
        };
        let (kind, flip, stride, codes) = match tensor.codes() {
            Codes::Bytes { codes, flip } => (0, *flip, k, lines(codes, bytes, first * k, bytes)?),
            Codes::WordsAlong(words) => {
                let stride = k.div_ceil(per_word);
                (1, 0, stride, lines(cast_slice(words), bytes, first * stride * 4, bytes)?)
            }
            Codes::WordsDown(words) => (2, 0, rows, lines(cast_slice(words), n * 4, first * 4, rows * 4)?),
            Codes::WordsAcross(words) => {
                let [n, first, rows] = [n, first, rows].map(|rows| rows / NIBBLES);
                (3, 0, rows, lines(cast_slice(words), n * 4, first * 4, rows * 4)?)
            }
            Codes::Blocks { bytes: blocks, form } => {
                let stride = form.bytes_of_row(k).unwrap_or(0);
                let kind = if form.table.is_some() { 6 } else { 5 };
                (kind, form.flip, stride, lines(blocks, bytes, first * stride, bytes)?)
            }
            &Codes::Random { first: number, stride: words } => {
                // Of each of the two fields in a byte, the bits that its code has.
                let mask = if format.bits == 3 { 0x77 } else { 0xff };
                (4, mask, words, number + (first * words) as u64)
            }
            Codes::Rows(unpack) => {
                /// Rows that are unpacked together: their words share cache lines.
                const TOGETHER: usize = 64;
                let write = |range: Range<usize>, to: &mut [u8]| {
                    let first = first + range.start / k;
                    to.par_chunks_mut(TOGETHER * k).enumerate().for_each(|(chunk, out)| {
                        let first = first + chunk * TOGETHER;
                        unpack(first..first + out.len() / k, out);
                    });
                    let most = to.par_chunks(1 << 16).map(|codes| codes.iter().fold(0, |most, &code| code.max(most)));
                    match most.max() {
                        Some(code) if u32::from(code) > format.max_code() => {
                            Err(Error::invalid(OP, format!("codes of {} bits", format.bits), code.to_string()))
                        }
                        _ => Ok(()),
                    }
                };
                (0, 0, k, self.stage(staging, free, bytes, k, write)?)
            }
        };
        let scale_type = tensor.scales().0.dtype();
        let (offset_type, zero_bytes) = match tensor.zeros() {
            StoredZeros::Symmetric => (Float::F32, 0),
            StoredZeros::Integer(..) => (Float::F32, 2),
            StoredZeros::Float(o, _) => (o.dtype(), o.dtype().size_bytes()),
        };
        let sizes = if multiples { [1, 1, 2, 2] } else { [scale_type.size_bytes(), zero_bytes, size_of::<f32>(), 0] };
        // From the first of these rows on.
        let [by_scale, by_zero, by_channel, by_half] = params_of(tensor, multiples).map(|(_, strides)| strides);
        let strides = [by_scale, by_zero, by_channel, by_half];
        let [scales, zeros, channels, offset_halves] =
            std::array::from_fn(|i| addresses[i] + (first * strides[i].output * sizes[i]) as u64);
        let sign =
            |of: Option<&Multiples<'_>>| of.and_then(|of| of.without_sign()).map_or(1, |(sign, _)| i32::from(sign));
        let (of_scales, of_offsets) = (tensor.scale_multiples(), tensor.offset_multiples());
        let form = if let Codes::Blocks { form, .. } = tensor.codes() { Some(&**form) } else { None };
        let fields = |of: fn(&BlockForm) -> codes::Fields| {
            let codes::Fields { at, run, bits } = form.map_or(codes::Fields::NONE, of);
            Fields { at: at as u32, run: run as u32, bits }
        };
        Ok(Part {
            codes,
            stride: stride as u64,
            scales,
            scale_output: by_scale.output as u64,
            scale_group: by_scale.group as u64,
            zeros,
            zero_output: by_zero.output as u64,
            zero_group: by_zero.group as u64,
            channels,
            offset_halves,
            top: top as u32,
            rows: rows as u32,
            kind,
            flip: u32::from(flip) * 0x0101_0101,
            scale_type: float_type(scale_type),
            offset_type: float_type(offset_type),
            block_codes: form.map_or(0, |form| form.codes as u32),
            block_bytes: form.map_or(0, |form| form.bytes as u32),
            low: fields(|form| form.low),
            high: fields(|form| form.high),
            add: form.map_or(0, |form| u32::from(form.add) * 0x0101_0101),
            block: of_scales.map_or(1, |of| of.block() as u32),
            scale_sign: if of_offsets.is_some() { sign(of_scales) } else { 1 },
            offset_sign: sign(of_offsets),
            table: cast(form.and_then(|form| form.table).map(table).unwrap_or_default()),
        })
    }

    /// Uploads to the next free place, and gives its address.
    fn stage(
        &mut self,
        staging: &mut Buffer<u8>,
        free: &mut usize,
        bytes: usize,
        unit: usize,
        write: impl FnMut(Range<usize>, &mut [u8]) -> Result<()>,
    ) -> Result<u64> {
        let to = staging.view_mut().slice(*free..*free + bytes);
        let address = to.pointer();
        self.uploader.upload(self.stream, to, unit, write)?;
        *free += aligned(bytes);
        Ok(address)
    }

    /// Puts the kernels for a slab into the stream.
    fn launch(&self, whole: Whole, slab: Range<usize>, table: &[Part], parts: u64, target: &Target) -> Result<()> {
        let Whole { format, n, k, groups, gate } = whole;
        let gated = gate.is_some();
        let mut params = Params {
            parts,
            order: 0,
            codes: 0,
            scales: 0,
            zeros: 0,
            n: n as u32,
            k: k as u32,
            groups: groups as u32,
            first: slab.start as u32,
            count: table.len() as u32,
            group: format.group.len(k).clamp(1, i32::MAX as usize) as u32,
            atom_group: 0,
            middle: format.middle(),
            scale_type: float_type(format.scale),
            zero_kind: zero_kind(format.zero),
            factors: 0,
            gated: gated.into(),
            raised: 0,
            atom_bits: 0,
            multiples: 0,
            padding: 0,
        };
        let strips = slab.len().div_ceil(OUTPUTS);
        let tiles = strips * k.div_ceil(128);
        let launches = match *target {
            Target::Wna16 { atom, atoms, rows, order } => {
                (params.codes, params.scales, params.order) = (atoms, rows, order);
                (params.atom_group, params.raised) = (atom.group as u32, (-atom.base(format)) as u32);
                if atom.table.is_some() {
                    params.middle = atom.number_of(format.middle() as u8, 0);
                }
                (params.atom_bits, params.multiples) = (atom.bits, atom.multiples.into());
                (params.factors, params.scale_type) = (atom.factors.into(), float_type(atom.scale));
                let rows = match atom.multiples {
                    true => ("wna16_multiples", strips * k.div_ceil(8 * 128), THREADS),
                    false => ("wna16_rows", if atom.has_rows() { strips } else { 0 }, OUTPUTS as u32),
                };
                let kernel = format!("wna16<{}, {gated}, {}>", atom.bits, field_bits(format.bits));
                [(kernel, tiles, THREADS), (rows.0.into(), rows.1, rows.2)]
            }
            Target::Plain { codes, scales, zeros } => {
                (params.codes, params.scales, params.zeros) = (codes, scales, zeros);
                let field = field_bits(format.bits);
                let blocks = slab.len().div_ceil(THREADS as usize) * groups;
                [(format!("plain<{field}>"), tiles, THREADS), ("plain_params".into(), blocks, THREADS)]
            }
            Target::Values { out, group_index } => {
                (params.codes, params.zeros) = (out, group_index);
                let field = field_bits(format.bits);
                [(format!("values<{field}>"), tiles, THREADS), (String::new(), 0, THREADS)]
            }
        };
        for (name, blocks, threads) in launches.into_iter().filter(|&(_, blocks, _)| blocks > 0) {
            let blocks = i32::try_from(blocks).map_err(|_| {
                Error::invalid(OP, "a slab of fewer than 2³¹ blocks", format!("{blocks} for {n} × {k}"))
            })?;
            let function = self.gpu.function(&Instance::new(&SOURCE, name))?;
            // SAFETY: the one parameter is the source's `Params`; the parts in its table are as long as their rows say, as
            // `StoredTensor` has checked, and the target has room for the whole.
            unsafe { function.launch(self.stream, &Launch::linear(blocks as u32, threads), &[Arg::new(&params)]) }?;
        }
        Ok(())
    }
}
