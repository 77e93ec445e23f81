//! One row of exact activations by int8 dot products with AVX-512 VNNI.
//!
//! As [`exact_row`](super::exact_row) says; an integer of x is four bytes with sign, and two sums of bytes are joined as integers.
//!
//! ```text
//! X = Σ D[j]·256^j, D from −128 to 127
//! acc[0], acc[2] = −zero·Σ(D[0] + 256·D[1]), −zero·Σ(D[2] + 256·D[3])
//! for each 4 columns, for each j:  acc[j] += dot4(codes, D[j])                                               vpdpbusd
//! low, high = acc[0] + 256·acc[1], acc[2] + 256·acc[3]
//! ```

use super::exact_row::{Functions, PanelsFn};
use crate::cpu::isa::AHEAD;
use crate::layout::cpu_n16::TABLE;

pub(super) const FUNCTIONS: Functions = Functions {
    add_block: x86::add_block,
    panels,
    // Four products of each code of a few bits leave the processor's own prefetcher behind.
    ahead: |cpu, form| if form == 8 { cpu.stream_ahead } else { AHEAD },
};

fn panels(form: u32) -> PanelsFn {
    fn of_form<const FORM: u32>() -> PanelsFn {
        x86::panels::<FORM>
    }
    // Whatever a table's values are.
    for_form!(form, of_form(), TABLE.. => TABLE)
}

mod x86 {
    use crate::cpu::matmul::a8_avx512vnni::add_tiles;
    use crate::cpu::matmul::blocking::SPANS_TOGETHER;
    use crate::cpu::matmul::exact_row::{BLOCK, Block, Exponent, FixedPoint, Places};
    use crate::cpu::x86::avx512::{Made, RUN, as_floats, load_f16, load_f32, load_u16, room, table};
    use crate::layout::cpu_n16::{CpuN16, PANEL, PackedZeros, PerGroup, quads, tile_bytes};
    use half::f16;
    use std::arch::x86_64::*;
    use std::mem::MaybeUninit;

    /// See [`Functions::add_block`](super::Functions): bytes of four columns lie `[j][4]`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) fn add_block(w: &CpuN16, places: Places, x: &[f32], all: &mut FixedPoint) {
        let mut values = [_mm512_setzero_ps(); BLOCK / 16];
        let vectors = x.len().div_ceil(16);
        for (v, x) in values.iter_mut().zip(x.chunks(16)) {
            // SAFETY: as many floats as there are bits in the mask.
            *v = unsafe { _mm512_maskz_loadu_ps(((1u32 << x.len()) - 1) as u16, x.as_ptr()) };
        }
        let mut total = 0.0;
        if let PackedZeros::Float(_) = w.zeros() {
            let mut sums = _mm512_setzero_pd();
            for &v in &values[..vectors] {
                sums = _mm512_add_pd(sums, _mm512_cvtps_pd(_mm512_castps512_ps256(v)));
                sums = _mm512_add_pd(sums, _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(v)));
            }
            total = _mm512_reduce_add_pd(sums) as f32;
        }
        loop {
            let mut greatest = _mm512_setzero_si512();
            for &v in &values[..vectors] {
                greatest = _mm512_max_epu32(greatest, _mm512_castps_si512(_mm512_abs_ps(v)));
            }
            let exponent = Exponent::of(_mm512_reduce_max_epu32(greatest));
            if !exponent.finite {
                values = [_mm512_setzero_ps(); BLOCK / 16];
            }
            let e = exponent.e;
            let (up, down) = (_mm512_set1_ps((31 - e) as f32), _mm512_set1_ps((e - 31) as f32));
            let (mut sums, mut lost) = (_mm512_setzero_si512(), 0);
            let from = all.digits.len();
            all.digits.resize(from + 16 * vectors, 0);
            for (v, bytes) in values[..vectors].iter_mut().zip(all.digits[from..].as_chunks_mut::<16>().0) {
                let integers = _mm512_cvtps_epi32(_mm512_scalef_ps(*v, up));
                let rest = _mm512_sub_ps(*v, _mm512_scalef_ps(_mm512_cvtepi32_ps(integers), down));
                let least = _mm512_mul_ps(_mm512_abs_ps(*v), _mm512_set1_ps(2.0f32.powi(-21)));
                let too_much = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(_mm512_abs_ps(rest), least);
                lost |= too_much;
                *v = _mm512_maskz_mov_ps(too_much, rest);
                // Bytes with sign, from the lowest on: −128 is carried as 128 is.
                let carries = _mm512_set1_epi32(0x0080_8080);
                let of_columns = _mm512_xor_si512(_mm512_add_epi32(integers, carries), carries);
                // Those of 4 columns, byte by byte of each.
                let by_byte = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                let of_bytes = _mm512_shuffle_epi8(of_columns, _mm512_broadcast_i32x4(by_byte));
                sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), of_bytes);
                // SAFETY: 64 bytes.
                unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), of_bytes) };
            }
            all.digits.truncate(from + x.len());
            let sums = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti32x8_epi32::<1>(sums));
            let sums = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
            let mut of_bytes = [0i32; 4];
            // SAFETY: 16 bytes.
            unsafe { _mm_storeu_si128(of_bytes.as_mut_ptr().cast(), sums) };
            let [a, b, c, d] = of_bytes;
            all.blocks.push(exponent.block(w, places, total, [a + 256 * b, c + 256 * d]));
            if lost == 0 {
                return;
            }
            total = 0.0;
        }
    }

    /// Offsets that are centred, and the zero points that make them so.
    type Centred = ([f32; PANEL], [i32; PANEL]);

    /// Numbers of a run of groups: scales, offsets as they are, and centred.
    struct Run {
        scales: Made<1>,
        offsets: Made<1>,
        centred: [MaybeUninit<Centred>; RUN],
    }

    /// See [`PanelsFn`](super::PanelsFn).
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c")]
    pub(super) unsafe fn panels<const FORM: u32>(
        w: &CpuN16,
        first: usize,
        x: &[FixedPoint],
        ahead: usize,
        c: &mut [f32],
    ) {
        let [scales, offsets] = room::<1>();
        let mut run = Run { scales, offsets, centred: [MaybeUninit::uninit(); RUN] };
        for (panel, c) in (first..).zip(c.as_chunks_mut().0) {
            // SAFETY: promised to this function.
            unsafe {
                match (w.scales(), w.zeros()) {
                    (PerGroup::F16(scales), PackedZeros::Symmetric | PackedZeros::Integer(_)) => {
                        panel_of::<FORM, true>((w, panel), scales, (x, ahead), &mut run, c);
                    }
                    _ => panel_of::<FORM, false>((w, panel), &[], (x, ahead), &mut run, c),
                }
            }
        }
    }

    /// With `HALVES` the scales are these, and there are no offsets; else numbers become floats a run of groups before they are needed.
    ///
    /// # Safety
    /// x was made for this weight.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c")]
    unsafe fn panel_of<const FORM: u32, const HALVES: bool>(
        (w, panel): (&CpuN16, usize),
        scales: &[f16],
        (x, ahead): (&[FixedPoint], usize),
        run: &mut Run,
        c: &mut [f32; PANEL],
    ) {
        let (tile_bytes, quads) = const { (tile_bytes(FORM), quads(FORM)) };
        let codes = &w.codes()[panel * w.panel_bytes()..(panel + 1) * w.panel_bytes()];
        let of_panel = panel * w.groups()..(panel + 1) * w.groups();
        let scales = if HALVES { &scales.as_chunks::<PANEL>().0[of_panel.clone()] } else { &[] };
        let zeros = match w.zeros() {
            PackedZeros::Integer(zeros) => &zeros.as_chunks::<PANEL>().0[of_panel.clone()],
            _ => &[],
        };
        let table = table(w);
        let (mut total, mut sum, mut run_of_sum) = (_mm512_setzero_ps(), _mm512_setzero_ps(), 0);
        for part in x {
            let (mut blocks, mut bytes) = (&part.blocks[..], part.digits.as_ptr());
            while let Some(block) = blocks.first() {
                let of_block = block.group / SPANS_TOGETHER;
                if of_block != run_of_sum {
                    (total, sum, run_of_sum) = (_mm512_add_ps(total, sum), _mm512_setzero_ps(), of_block);
                }
                let (mut first, mut of_run) = (0, blocks);
                let (mut scales_made, mut centred): (&[[f32; PANEL]], &[Centred]) = (&[], &[]);
                if HALVES {
                    // Groups ascend.
                    let is_of_run = |block: &Block| block.group / SPANS_TOGETHER == of_block;
                    of_run = &blocks[..blocks.partition_point(is_of_run).max(1)];
                } else {
                    // Before the blocks of a run: a call among them would bring the sum to memory and back.
                    first = block.group / RUN * RUN;
                    let len = RUN.min(w.groups() - first);
                    of_run = &of_run[..of_run.iter().take_while(|block| block.group < first + len).count()];
                    scales_made = as_floats(w.scales(), of_panel.start + first, len, &mut run.scales);
                    if let PackedZeros::Float(offsets) = w.zeros() {
                        let offsets = as_floats(offsets, of_panel.start + first, len, &mut run.offsets);
                        for (i, out) in run.centred[..len].iter_mut().enumerate() {
                            let (scale, offset) = (load_f32(&scales_made[i]), load_f32(&offsets[i]));
                            centre(scale, offset, out.write(([0.0; PANEL], [0; PANEL])));
                        }
                        // SAFETY: those of `len` groups were written.
                        centred = unsafe { std::slice::from_raw_parts(run.centred.as_ptr().cast(), len) };
                    }
                }
                blocks = &blocks[of_run.len()..];
                for block in of_run {
                    let mut sums = [[[_mm512_setzero_si512()]; 4]];
                    let mut zero = None;
                    if !centred.is_empty() {
                        zero = Some(load_i32(&centred[block.group - first].1));
                    } else if !zeros.is_empty() {
                        zero = Some(load_u16(&zeros[block.group]));
                    }
                    for half in 0..2 {
                        let less = _mm512_set1_epi32(block.less[half]);
                        sums[0][2 * half][0] =
                            if let Some(zero) = zero { _mm512_mullo_epi32(zero, less) } else { less };
                    }
                    let tile = codes.as_ptr().wrapping_add(block.tile * tile_bytes);
                    // SAFETY: the block lies within the panel, and has as many bytes.
                    unsafe {
                        add_tiles::<FORM, 4, 1, 1>((tile, 0, ahead), bytes.cast(), block.tiles, table, &mut sums)
                    };
                    bytes = bytes.wrapping_add(block.tiles * quads * 4);
                    // Sums of two bytes are below 2³⁰: 64 products of at most 255 · 128.
                    let [[[a], [b], [c], [d]]] = sums;
                    let low = _mm512_cvtepi32_ps(_mm512_add_epi32(a, _mm512_slli_epi32::<8>(b)));
                    let high = _mm512_cvtepi32_ps(_mm512_add_epi32(c, _mm512_slli_epi32::<8>(d)));
                    let dot = _mm512_fmadd_ps(low, _mm512_set1_ps(1.0 / 65536.0), high);
                    let dot = _mm512_mul_ps(dot, _mm512_set1_ps(block.scale));
                    let scale = match HALVES {
                        true => load_f16(&scales[block.group]),
                        false => load_f32(&scales_made[block.group - first]),
                    };
                    sum = _mm512_fmadd_ps(dot, scale, sum);
                    if !centred.is_empty() {
                        let offset = load_f32(&centred[block.group - first].0);
                        sum = _mm512_fmadd_ps(offset, _mm512_set1_ps(block.total), sum);
                    }
                }
            }
        }
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(c.as_mut_ptr(), _mm512_add_ps(total, sum)) };
    }

    /// A zero point that brings an offset near to 0, and what is left of it.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn centre(scale: __m512, offset: __m512, (rest, zero): &mut Centred) {
        // Nearly as good as a quotient: a zero point beside the nearest leaves little more.
        let codes = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), offset), _mm512_rcp14_ps(scale));
        // Of a scale of 0 any zero point will do.
        let codes = _mm512_max_ps(_mm512_min_ps(codes, _mm512_set1_ps(255.0)), _mm512_setzero_ps());
        let zeros = _mm512_cvtps_epi32(codes);
        let offset = _mm512_fmadd_ps(_mm512_cvtepi32_ps(zeros), scale, offset);
        // SAFETY: 16 numbers each.
        unsafe {
            _mm512_storeu_ps(rest.as_mut_ptr(), offset);
            _mm512_storeu_si512(zero.as_mut_ptr().cast(), zeros);
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load_i32(v: &[i32; PANEL]) -> __m512i {
        // SAFETY: 64 bytes.
        unsafe { _mm512_loadu_si512(v.as_ptr().cast()) }
    }
}
