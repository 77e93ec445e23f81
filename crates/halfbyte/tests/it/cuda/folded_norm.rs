//! Norms that two products of few rows share, against norms and products in f64.

use super::nvrtc::none_spills;
use super::products::{check, reference_of};
use super::{nvrtc, queues};
use crate::data::{Random, parse, rounded};
use crate::ops::Typed;
use bytemuck::Pod;
use halfbyte::cuda::Cuda;
use halfbyte::cuda::driver::{Buffer, View};
use halfbyte::cuda::matmul::{Fold, FoldedNorm, NextNorm, Packer, wna16_sm90};
use halfbyte::cuda::nn::{self, FloatBuffer, Gate, Norm};
use halfbyte::cuda::sources::{Arch, Instance};
use halfbyte::cuda::tiled::{Form, Tile};
use halfbyte::format::reference::{Bound, Product};
use halfbyte::kernel::Activation;
use halfbyte::layout::cuda_wna16::Atom;
use halfbyte::{Float, Linear, QTensor, Weight};

const EPS: f32 = 1e-5;

/// With x of a type: groups, zero points, whole rows, other bits, scales of another type.
const FORMATS: [(&str, Float); 7] = [
    ("w4a16-g128", Float::F16),
    ("w4a16-g32-asym", Float::F16),
    ("w8a16-g128", Float::BF16),
    ("w3a16-g64-asym", Float::F16),
    ("w4a16", Float::F16),
    ("w4a16-g64-sbf16", Float::BF16),
    ("w2a16-g32", Float::F16),
];

/// Columns of the first product, of the stream, outputs of the second.
const SHAPES: [[usize; 3]; 4] = [[384, 448, 200], [1152, 4096, 1600], [4096, 1088, 96], [14336, 2048, 24]];

const ROWS: [usize; 7] = [1, 2, 7, 11, 16, 19, 32];

/// Products of so many rows, with x of a type, whose results go to and come from a stream of a width.
struct Bench<'a> {
    cuda: &'a Cuda,
    x: Float,
    m: usize,
    width: usize,
    what: String,
}

/// What the first product leaves, and what follows from it.
struct Left {
    scaled: FloatBuffer,
    squares: Buffer<u64>,
    scales: Buffer<f32>,
    /// What sums of the second product are to be multiplied by, row by row.
    factors: Vec<f64>,
    /// What its scales are to follow from.
    of_norm: Vec<f64>,
}

impl Bench<'_> {
    fn upload<T: Pod>(&self, values: &[T]) -> Buffer<T> {
        let mut buffer = self.cuda.gpu().context().allocate(values.len()).unwrap();
        self.cuda.stream().upload(values, buffer.view_mut()).unwrap();
        buffer
    }

    fn read<T: Pod>(&self, view: View<'_, T>) -> Vec<T> {
        let mut out = vec![T::zeroed(); view.len()];
        self.cuda.stream().download(view, &mut out).unwrap();
        out
    }

    fn floats(&self, buffer: &FloatBuffer) -> Vec<f32> {
        match buffer {
            FloatBuffer::F16(v) => self.read(v.view()).into_iter().map(f32::from).collect(),
            FloatBuffer::BF16(v) => self.read(v.view()).into_iter().map(f32::from).collect(),
            FloatBuffer::F32(v) => self.read(v.view()),
        }
    }

    fn room(&self, dtype: Float, width: usize) -> FloatBuffer {
        FloatBuffer::allocate(self.cuda.gpu(), dtype, self.m * width).unwrap()
    }

    fn pack(&self, w: &QTensor, name: &str) -> Linear<Cuda> {
        Linear::for_inputs(self.cuda, Weight::Quantized(w, parse(name).act), self.x).unwrap()
    }

    /// What a norm multiplies a row by.
    fn factor(&self, row: &[f32]) -> f64 {
        let squares: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum();
        1.0 / (squares / self.width as f64 + f64::from(EPS)).sqrt()
    }

    /// Whether scales are powers of two near to factors, times 2⁻⁶.
    fn check_scales(&self, scales: &[f32], factors: &[f64]) {
        for (&scale, factor) in scales.iter().zip(factors) {
            let power = f64::from(scale) * 64.0;
            let near = power.log2().fract() == 0.0 && (0.9999..2.0002).contains(&(factor / power));
            assert!(near, "{}: scale {scale} for a factor of {factor}", self.what);
        }
    }

    /// A stream, normed by a kernel, then with a product that shares the next norm.
    fn left_by_a_product(&self, random: &mut Random, name: &str, k: usize) -> Left {
        let (&Self { cuda, x, m, width, ref what }, format) = (self, parse(name));
        let (gpu, stream) = (cuda.gpu(), cuda.stream());
        let w = random.qtensor(format.weight, [width, k], false);
        let bias = random.normals(width);
        let product = self.pack(&w, name).with_bias(bias.clone()).unwrap();
        // Rows differ by orders of magnitude.
        let rows = (0..m).map(|row| [1.0, 300.0, 0.01][row % 3]);
        let before: Vec<f32> =
            rows.flat_map(|size| random.activations(width).into_iter().map(move |v| v * size)).collect();
        let weight = random.normals(width);
        let (mut residual, weights) = (self.upload(&before), self.upload(&weight));
        let (mut scaled, mut scales) = (self.room(x, width), self.upload(&vec![f32::NAN; m]));
        let mut squares = self.upload(&vec![u64::MAX; FoldedNorm::squares(m)]);
        let norm = Norm {
            residual: residual.view_mut(),
            update: None,
            weight: weights.view(),
            eps: EPS,
            out: scaled.view_mut(0..m * width),
            exact: None,
            next: Some(NextNorm { squares: squares.view_mut(), scales: scales.view_mut() }),
        };
        nn::rms_norm(gpu, stream, norm).unwrap();
        let first_scales = self.read(scales.view());
        let factors: Vec<f64> = before.chunks_exact(width).map(|row| self.factor(row)).collect();
        self.check_scales(&first_scales, &factors);

        let of_product = rounded(&random.activations(m * k), x);
        let on_device = FloatBuffer::upload(gpu, stream, Typed::new(&of_product, x).get()).unwrap();
        let part = FoldedNorm::Leaves {
            scaled: scaled.view_mut(0..m * width),
            weight: weights.view(),
            squares: squares.view_mut(),
            scales: scales.view(),
        };
        product.forward_folded(cuda, on_device.view(0..m * k), m, residual.view_mut().into(), &part).unwrap();

        // The stream has what was there, the product and its bias; the rest follows from it.
        let got = self.read(residual.view());
        let Product { mut value, mut magnitude } = reference_of(&of_product, m, &w, format.act);
        for (at, (value, magnitude)) in value.iter_mut().zip(&mut magnitude).enumerate() {
            for term in [before[at], bias[at % width]].map(f64::from) {
                (*value, *magnitude) = (*value + term, *magnitude + term.abs());
            }
        }
        check(&got, &Product { value, magnitude }, Bound::new(Float::F32, k), &format!("{what}: the stream"));
        for (at, (&v, got)) in got.iter().zip(self.floats(&scaled)).enumerate() {
            let want = x.round(v * weight[at % width] * first_scales[at / width]);
            assert!(got == want, "{what}: element {at} of what is scaled is {got}, expected {want}");
        }
        for (bins, row) in self.read(squares.view()).chunks_exact(FoldedNorm::squares(1)).zip(got.chunks_exact(width)) {
            let want: f64 = row.iter().map(|&v| f64::from(v).powi(2)).sum();
            let in_units = bins.iter().zip(0..).map(|(&bin, i)| bin as f64 * 2f64.powi(16 * i - 150));
            let sum: f64 = in_units.sum();
            assert!((sum - want).abs() <= want * 2f64.powi(-20), "{what}: squares {sum}, expected {want}");
        }
        let of_norm: Vec<f64> = got.chunks_exact(width).map(|row| self.factor(row)).collect();
        let factors = of_norm.iter().zip(&first_scales).map(|(factor, &scale)| factor / f64::from(scale)).collect();
        Left { scaled, squares, scales, factors, of_norm }
    }

    /// A product of what was left, with so many outputs of a type.
    fn divided(&self, by: &Linear<Cuda>, left: &Left, y: Float, outputs: usize) -> Vec<f32> {
        let (mut out, mut scales) = (self.room(y, outputs), self.upload(&vec![f32::NAN; self.m]));
        let mut squares = self.upload(&vec![u64::MAX; FoldedNorm::squares(self.m)]);
        let part = FoldedNorm::Divides {
            squares: left.squares.view(),
            scales: left.scales.view(),
            next: NextNorm { squares: squares.view_mut(), scales: scales.view_mut() },
            eps: EPS,
        };
        let (x, to) = (left.scaled.view(0..self.m * self.width), out.view_mut(0..self.m * outputs));
        by.forward_folded(self.cuda, x, self.m, to, &part).unwrap();
        self.check_scales(&self.read(scales.view()), &left.of_norm);
        assert!(self.read(squares.view()).iter().all(|&bin| bin == 0), "{}: the next squares", self.what);
        self.floats(&out)
    }

    /// A product of both, gated.
    fn gated(&self, pair: &[QTensor; 2], name: &str) -> Linear<Cuda> {
        let mut packer = Packer::new(self.cuda.gpu(), self.cuda.stream());
        let stored = pair.each_ref().map(Into::into);
        Linear::of_packed(self.cuda, packer.pack_gated(stored.each_ref(), parse(name).act, Gate::SWIGLU).unwrap())
    }

    /// What the products of a case are computed by, to be compiled at once; None: not all of them do their part of a norm.
    fn instances(&self, name: &str, [k, n]: [usize; 2]) -> Option<Vec<Instance>> {
        let (mut random, format) = (Random(1), parse(name).weight);
        let leaves = self.pack(&random.qtensor(format, [self.width, k], false), name);
        let pair = [(); 2].map(|()| random.qtensor(format, [n, self.width], false));
        let (divides, gated) = (self.pack(&pair[0], name), self.gated(&pair, name));
        let all =
            [(leaves, Float::F32, Fold::Leaves), (divides, Float::F32, Fold::Divides), (gated, self.x, Fold::Divides)];
        let of =
            |(product, y, fold): (Linear<Cuda>, _, _)| product.folding(self.cuda, [self.x, y], self.m, fold).unwrap();
        all.into_iter().map(of).collect()
    }

    /// A product that leaves, then products that divide, of outputs and of gates with what they let through.
    fn check_products(&self, random: &mut Random, name: &str, [k, n]: [usize; 2]) {
        let left = self.left_by_a_product(random, name, k);
        let pair = [(); 2].map(|()| random.qtensor(parse(name).weight, [n, self.width], false));
        let close = |got: f32, want: f64, allowed: f64, at: usize| {
            let error = (f64::from(got) - want).abs();
            assert!(error <= allowed, "{}: output {at} is {got}, expected {want} ± {allowed:e}", self.what);
        };
        let [gates, others] = pair.each_ref().map(|w| {
            let want = self.expected(w, &left);
            let got = self.divided(&self.pack(w, name), &left, Float::F32, n);
            got.iter().zip(&want).enumerate().for_each(|(at, (&got, &(want, allowed)))| close(got, want, allowed, at));
            want
        });
        let got = self.divided(&self.gated(&pair, name), &left, self.x, n);
        for (at, ((got, (gate, of_gate)), (other, of_other))) in got.into_iter().zip(gates).zip(others).enumerate() {
            let let_through = gate / (1.0 + (-gate).exp());
            let sums = 1.1 * of_gate * (other.abs() + of_other) + let_through.abs() * of_other;
            let want = let_through * other;
            close(got, want, sums + 1.1 * self.x.unit_roundoff() * want.abs() + 2f64.powi(-24), at);
        }
    }

    /// What such a product is to give, and how far it may be from that.
    fn expected(&self, w: &QTensor, left: &Left) -> Vec<(f64, f64)> {
        let reference = reference_of(&self.floats(&left.scaled), self.m, w, parse("w4a16").act);
        let bound = Bound::new(Float::F32, self.width);
        // Of the factor: squares in sums of 16, sums of bins, then a root and two divisions.
        let of_factor = 32.0 * 2f64.powi(-24);
        let both = reference.value.iter().zip(&reference.magnitude).enumerate();
        let of = |(at, (value, magnitude)): (usize, (&f64, &f64))| {
            let factor = left.factors[at / w.n()];
            (value * factor, bound.allowed(magnitude * factor) + of_factor * (value * factor).abs())
        };
        both.map(of).collect()
    }
}

#[test]
fn products_that_share_a_norm_are_within_the_bound() {
    for cuda in queues().into_iter().filter(|cuda| cuda.gpu().caps().arch.is_hopper()) {
        let cases = FORMATS.into_iter().enumerate().flat_map(|(i, (name, x))| {
            let cuda = &cuda;
            ROWS.into_iter().enumerate().map(move |(j, m)| {
                let [k, width, n] = SHAPES[(i + j) % SHAPES.len()];
                let what = format!("{name}, x in {x}, {m} rows, {k} to {width} to {n}");
                (Bench { cuda, x, m, width, what }, name, [k, n])
            })
        });
        let with_instances =
            cases.filter_map(|case| case.0.instances(case.1, case.2).map(|instances| (case, instances)));
        let (cases, instances): (Vec<_>, Vec<_>) = with_instances.unzip();
        // Two blocks of a multiprocessor have no registers for it beside 32 sums of codes of 8 bits.
        assert!(cases.len() + 1 >= FORMATS.len() * ROWS.len(), "{} cases", cases.len());
        let mut all = instances.concat();
        all.sort_by_cached_key(ToString::to_string);
        all.dedup_by_key(|instance| instance.to_string());
        cuda.gpu().prepare(&all, |_| ()).unwrap();
        let mut random = Random(171);
        cases.iter().for_each(|(bench, name, shape)| bench.check_products(&mut random, name, *shape));
    }
}

/// Without a device: in registers, in every form that does its part.
#[test]
#[ignore = "minutes; run with: cargo test --test it -- --ignored products_that_fold_norms"]
fn products_that_fold_norms_compile_without_spills() {
    let Some(nvrtc) = nvrtc() else { return };
    let arch = "sm_90a".parse::<Arch>().unwrap();
    let plain = Atom::W4_G128;
    let atoms = [
        plain,
        Atom { zero: true, group: 32, ..plain },
        Atom { scale: Float::BF16, zero: true, group: 64, ..plain },
        Atom { bits: 8, ..plain },
        Atom { bits: 3, zero: true, ..plain },
        Atom { bits: 8, group: 0, ..plain },
        Atom { table: Some(Atom::A_TABLE), group: 32, ..plain },
    ];
    let of = |atom: Atom| {
        let types = [(Float::F32, Fold::Leaves), (Float::F32, Fold::Divides), (Float::F16, Fold::Divides)];
        types.into_iter().flat_map(move |(y, fold)| {
            let form = Form { x: Float::F16, ..Form::floats(atom, y) };
            let few = wna16_sm90::config::every(&form)
                .into_iter()
                .filter(move |&config| wna16_sm90::folds_norms(&form, config));
            few.map(move |config| config.instance(&form, Activation::None).defining("FOLDED_NORM", fold as usize))
        })
    };
    let all: Vec<_> = atoms.into_iter().flat_map(of).collect();
    none_spills(nvrtc, arch, &all);
}

#[test]
fn what_does_not_fit_a_folded_norm_is_refused() {
    for cuda in queues().into_iter().filter(|cuda| cuda.gpu().caps().arch.is_hopper()) {
        let mut random = Random(172);
        let (x, m, width) = (Float::F16, 4, 448);
        let bench = Bench { cuda: &cuda, x, m, width, what: "refused".into() };
        let left = bench.left_by_a_product(&mut random, "w4a16-g128", 384);
        let (mut scales, mut next) = (bench.upload(&[0.0f32; 4]), bench.upload(&[0u64; 64]));
        let mut out = bench.room(Float::F32, 64);
        let linear = |name: &str, shuffled: bool| {
            let w = Random(9).qtensor(parse(name).weight, [64, width], shuffled);
            bench.pack(&w, name)
        };
        let of = |linear: &Linear<Cuda>, m: usize| linear.folding(&cuda, [x, Float::F32], m, Fold::Divides).unwrap();
        let plain = linear("w4a16-g64", false);
        assert!(of(&plain, 32).is_some() && of(&plain, 33).is_none());
        // Columns in another order, quantised activations, and rows of a stream that end within 64 columns.
        assert!(of(&linear("w4a16-g64", true), 4).is_none() && of(&linear("w4a8-g64", false), 4).is_none());
        assert!(of(&linear("w4a16-g32-float-sf32", false), 4).is_none());
        let narrow = bench.pack(&random.qtensor(parse("w4a16-g64").weight, [72, 384], false), "w4a16-g64");
        assert!(narrow.folding(&cuda, [x, Float::F32], 4, Fold::Leaves).unwrap().is_none());
        for (linear, rows, squares) in [(&linear("w4a16-g64", true), m, 64), (&plain, m, 63), (&plain, m - 1, 64)] {
            let part = FoldedNorm::Divides {
                squares: left.squares.view().slice(0..squares),
                scales: left.scales.view().slice(0..rows),
                next: NextNorm { squares: next.view_mut(), scales: scales.view_mut() },
                eps: EPS,
            };
            let (x, y) = (left.scaled.view(0..m * width), out.view_mut(0..m * 64));
            assert!(linear.forward_folded(&cuda, x, m, y, &part).is_err(), "{rows} rows, {squares} squares");
        }
    }
}
