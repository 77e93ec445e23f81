//! What a language model needs besides quantised products, against f64, on every device of the machine.

mod attention;
mod collectives;
mod dense;
mod expert_layer;
pub(super) mod experts;
mod logits;
mod persistent_decode;
mod rows;

use super::gpus;
use crate::data::rounded;
use bytemuck::Pod;
use half::{bf16, f16};
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::{Buffer, FloatView, FloatViewMut, Stream, View, ViewMut};
use halfbyte::cuda::nn::{
    self, Attention, AttentionWorkspace, Dense, FloatBuffer, HeadNorms, KvCache, NewRows, Rope, Rows, Table,
};
use halfbyte::kernel::{Heads, KvType};
use halfbyte::{Error, Float, Floats};

const TYPES: [Float; 3] = [Float::F16, Float::BF16, Float::F32];

/// Elements before and after every output, to see that a kernel writes nothing else.
const GUARD: usize = 64;

pub(super) struct Bench<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) stream: Stream,
}

impl<'a> Bench<'a> {
    pub(super) fn new(gpu: &'a Gpu) -> Self {
        Self { gpu, stream: gpu.stream().unwrap() }
    }

    pub(super) fn upload<T: Pod>(&self, values: &[T]) -> Buffer<T> {
        let mut buffer = self.gpu.context().allocate(values.len()).unwrap();
        self.stream.upload(values, buffer.view_mut()).unwrap();
        buffer
    }

    /// Values that are exact in a type, as that type.
    pub(super) fn floats(&self, values: &[f32], dtype: Float) -> FloatBuffer {
        match dtype {
            Float::F16 => FloatBuffer::F16(self.upload(&values.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>())),
            Float::BF16 => {
                FloatBuffer::BF16(self.upload(&values.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>()))
            }
            Float::F32 => FloatBuffer::F32(self.upload(values)),
        }
    }

    pub(super) fn read<T: Pod>(&self, view: View<'_, T>) -> Vec<T> {
        let mut out = vec![T::zeroed(); view.len()];
        self.stream.download(view, &mut out).unwrap();
        out
    }

    pub(super) fn widened(&self, view: FloatView<'_>) -> Vec<f32> {
        match view {
            FloatView::F16(v) => self.read(v).into_iter().map(f16::to_f32).collect(),
            FloatView::BF16(v) => self.read(v).into_iter().map(bf16::to_f32).collect(),
            FloatView::F32(v) => self.read(v),
        }
    }

    /// What `work` writes to an output of `len` elements, twice with the same bits and nothing around it.
    pub(super) fn output(&self, dtype: Float, len: usize, work: &mut dyn FnMut(FloatViewMut<'_>)) -> Vec<f32> {
        let mut once = || {
            let poison = vec![1e4; len + 2 * GUARD];
            let mut out = self.floats(&rounded(&poison, dtype), dtype);
            work(out.view_mut(GUARD..GUARD + len));
            let all = self.widened(out.view(0..len + 2 * GUARD));
            let poison = dtype.round(1e4);
            assert!(all[..GUARD].iter().chain(&all[GUARD + len..]).all(|&v| v == poison), "wrote outside");
            all[GUARD..GUARD + len].to_vec()
        };
        let (first, second) = (once(), once());
        assert_eq!(bits(&first), bits(&second), "not the same bits twice");
        first
    }
}

pub(super) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn whole(buffer: &FloatBuffer) -> FloatView<'_> {
    buffer.view(0..buffer.len())
}

pub(super) fn single(view: FloatViewMut<'_>) -> ViewMut<'_, f32> {
    match view {
        FloatViewMut::F32(view) => view,
        other => panic!("{other:?}"),
    }
}

/// Each value within `relative` of what is wanted, besides being rounded to `out`.
pub(super) fn close(got: &[f32], want: &[f64], out: Float, absolute: f64, relative: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    // Halfs below their normal range are rounded to a step of 2⁻²⁴.
    let smallest = if out == Float::F16 { 2f64.powi(-25) } else { 0.0 };
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        if want.is_nan() {
            assert!(got.is_nan(), "{what}: element {i} is {got}, expected NaN");
            continue;
        }
        let allowed = absolute + relative * want.abs();
        let allowed = allowed + out.unit_roundoff() * (want.abs() + allowed) + smallest;
        let error = (f64::from(got) - want).abs();
        assert!(error <= allowed, "{what}: element {i} is {got}, expected {want} ± {allowed:e}, off by {error:e}");
    }
}

#[test]
fn wrong_shapes_are_errors() {
    for gpu in gpus() {
        let bench = Bench::new(&gpu);
        let heads = Heads { heads: 4, kv_heads: 2, head_size: 16 };
        let mut cache = KvCache::new(&gpu, 2, heads, 8, KvType::F16).unwrap();
        for kv in KvType::ALL {
            assert_eq!(KvCache::new(&gpu, 2, heads, 8, kv).unwrap().bytes(), 2 * 2 * 2 * 8 * kv.bytes(16));
        }
        let rope = Rope::new(&gpu, &bench.stream, &[1.0; 8]).unwrap();
        let (positions, mut qkv) = (bench.upload(&[0u32, 1]), bench.upload(&vec![0f32; 2 * heads.row()]));
        let table = bench.upload(&[0u32, 0]);
        let mut workspace = AttentionWorkspace::new(&gpu, &bench.stream, heads, 1, 8).unwrap();
        let mut out = bench.floats(&[0.0; 2 * 64], Float::F16);
        let mut attend = |len: usize, longest, window, layer, out_len, rows, pages: bool| {
            let count = (len / heads.row()).min(2);
            let what = Attention {
                qkv: qkv.view().slice(0..len),
                append: None,
                rows,
                positions: positions.view().slice(0..count),
                pages: pages.then(|| table.view()),
                fresh: 2,
                longest,
                scale: 1.0,
                window,
                cap: None,
                slopes: None,
                sinks: None,
                kernels: nn::Kernels::All,
            };
            let out = out.view_mut(0..out_len);
            nn::attention(&gpu, &bench.stream, &what, &mut cache, layer, &mut workspace, out)
        };
        let (row, one, each) = (heads.row(), Rows::OfOneText, Rows::OnePerText);
        attend(2 * row, 8, None, 1, 128, one, false).unwrap();
        for (len, longest, window, layer, out_len, rows, pages) in [
            (row + 1, 8, None, 1, 64, one, false),
            (row, 9, None, 1, 64, one, false),
            (row, 8, None, 2, 64, one, false),
            (row, 8, None, 1, 63, one, false),
            (2 * row, 1, None, 1, 128, one, false),
            (row, 8, Some(0), 1, 64, one, false),
            // Texts have pages, and a cache that has some is of whole ones.
            (2 * row, 8, None, 1, 128, each, false),
            (2 * row, 8, None, 1, 128, each, true),
        ] {
            let error = attend(len, longest, window, layer, out_len, rows, pages).unwrap_err();
            assert!(matches!(error, Error::Invalid { op: "attention", .. }), "{error}");
        }
        let stream = &bench.stream;
        let (weight, short) = (bench.upload(&[1f32; 16]), bench.upload(&[1f32; 15]));
        let large = Rope::new(&gpu, stream, &[1.0; 9]).unwrap();
        let norms = |queries, keys| HeadNorms { queries, keys, eps: 0.0 };
        for (rope, len, norms, layer) in [
            (&rope, row + 1, None, 0),
            (&rope, row, None, 2),
            (&large, row, None, 0),
            (&rope, row, Some(norms(short.view(), weight.view())), 0),
            (&rope, row, Some(norms(weight.view(), short.view())), 0),
        ] {
            let of_rows = positions.view().slice(0..len / row);
            let rows = NewRows { qkv: qkv.view_mut().slice(0..len), positions: of_rows, slots: of_rows, norms };
            let error = rope.apply(&gpu, stream, rows, &mut cache, layer).unwrap_err();
            assert!(matches!(error, Error::Invalid { op: "rope", .. }), "{error}");
        }
        assert!(Rope::new(&gpu, stream, &[f64::NAN]).is_err() && Rope::new(&gpu, stream, &[1.0; 129]).is_err());
        for (heads, capacity) in [
            (Heads { kv_heads: 3, ..heads }, 8),
            (Heads { head_size: 257, ..heads }, 8),
            (heads, usize::MAX / 2),
            (heads, 1 << 31),
        ] {
            assert!(KvCache::new(&gpu, 1 << 20, heads, capacity, KvType::F32).is_err());
        }
        let (ids, two) = (bench.upload(&[0u32]), bench.upload(&[0f32; 2]));
        let table = bench.floats(&[0.0; 6], Float::F32);
        let mut to = bench.upload(&[0f32; 6]);
        assert!(
            nn::embed(&gpu, stream, (Table::Floats(whole(&table)), 0), 4, ids.view(), 1.0, to.view_mut().slice(0..4))
                .is_err()
        );
        assert!(
            nn::embed(&gpu, stream, (Table::Floats(whole(&table)), 0), 3, ids.view(), 1.0, to.view_mut().slice(0..4))
                .is_err()
        );
        assert!(
            nn::embed(
                &gpu,
                stream,
                (Table::Floats(whole(&table)), 1 << 40),
                3,
                ids.view(),
                1.0,
                to.view_mut().slice(0..3)
            )
            .is_err()
        );
        assert!(nn::columns(&gpu, stream, two.view(), to.view_mut(), 3, 2..4).is_err());
        // Rows of no elements, of which there is none, as on a CPU.
        assert!(nn::columns(&gpu, stream, two.view().slice(0..0), to.view_mut().slice(0..0), 0, 0..0).is_err());
        assert!(Dense::new(&gpu, stream, Floats::F32(&[0.0; 5]), [2, 3]).is_err());
        stream.synchronize().unwrap();
    }
}
