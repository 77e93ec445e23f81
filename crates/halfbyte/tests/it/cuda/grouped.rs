//! Products with several weights in one launch, and who deals rows out to them.

use super::nn::experts::interleaved;
use super::nn::{Bench, bits, close};
use super::{gpus, half_of};
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use crate::layout::types_of_files::Fewer;
use halfbyte::cuda::Workspace;
use halfbyte::cuda::driver::{Buffer, FloatView, View};
use halfbyte::cuda::matmul::{self, Call, Epilogue, Grouped, GroupedCall, Packed, Packer};
use halfbyte::cuda::nn::{Assignment, Deal, Gate};
use halfbyte::format::reference::dequantize;
use halfbyte::kernel::{Activation, Problem};
use halfbyte::{Float, QTensor, StoredTensor};

#[test]
fn rows_are_dealt_out_in_order() {
    for gpu in gpus().into_iter().filter(|gpu| gpu.caps().arch.multiplies(Float::F16)) {
        let (bench, mut random) = (Bench::new(&gpu), Random(71));
        for case in 0..40 {
            let (experts, top_k) = ([1, 8, 33, 128, 700][case % 5], 1 + random.below(4));
            let rows = [1, 2, 7, 64, 300, 2000][random.below(6)];
            let (align, tiles) = ([1, 4][case % 2], [8 << random.below(4), 8 << random.below(6)]);
            let direct = rows == 1 && case % 3 == 0;
            let deal = Deal { experts, top_k, align, tiles, direct };
            let crowd = if case % 4 == 0 { 1 + experts / 4 } else { experts };
            let ids: Vec<u32> = (0..rows * top_k).map(|_| random.below(crowd) as u32).collect();
            let mut assignment = Assignment::allocate(&gpu, ids.len(), experts, 4, [8; 2]).unwrap();
            assignment.assign(&gpu, &bench.stream, bench.upload(&ids).view(), deal).unwrap();
            let (of_places, places) = (bench.read(assignment.rows()), bench.read(assignment.places()));
            assert_eq!((of_places.len(), places.len()), (deal.places(ids.len()), ids.len()));
            // Where each expert begins, and each choice behind those before it.
            let mut next = vec![0usize; experts];
            ids.iter().for_each(|&id| next[id as usize] += 1);
            let counts = next.clone();
            let mut begin = 0;
            for first in &mut next {
                (begin, *first) = (begin + first.next_multiple_of(align), begin);
            }
            let firsts = next.clone();
            let mut taken = vec![false; of_places.len()];
            for (choice, &id) in ids.iter().enumerate() {
                let place = &mut next[id as usize];
                assert_eq!((places[choice] as usize, of_places[*place] as usize), (*place, choice / top_k));
                taken[*place] = true;
                *place += 1;
            }
            assert!(of_places.iter().zip(&taken).all(|(&row, &taken)| taken || row == 0));
            for (product, tile) in tiles.into_iter().enumerate() {
                let (list, count) = assignment.list(product);
                let (list, count) = (bench.read(list), bench.read(count)[0] as usize);
                let of_expert = |expert: usize| {
                    let (first, count) = (firsts[expert], counts[expert]);
                    (0..count.div_ceil(tile)).map(move |i| {
                        let row = first + i * tile;
                        let x = if product == 0 && direct { 0 } else { row };
                        [expert, row, (row + tile).min(first + count), x].map(|v| v as u32)
                    })
                };
                let want: Vec<u32> = (0..experts).flat_map(of_expert).flatten().collect();
                assert_eq!(list[..4 * count], want, "{deal:?}");
            }
        }
        let (ids, bench) = (bench.upload(&[0u32; 64]), &bench);
        let mut assignment = Assignment::allocate(&gpu, 32, 8, 1, [8; 2]).unwrap();
        let of = Deal { experts: 8, top_k: 2, align: 1, tiles: [8; 2], direct: false };
        let mut refused =
            |len, deal| assignment.assign(&gpu, &bench.stream, ids.view().slice(0..len), deal).unwrap_err().to_string();
        assert!(refused(64, of).contains("32 choices"));
        assert!(refused(3, of).contains("Deal"));
        assert!(refused(8, Deal { direct: true, ..of }).contains("one row"));
        assert!(refused(8, Deal { tiles: [8, 0], ..of }).contains("tiles"));
        assert!(refused(16, Deal { experts: 4000, ..of }).contains("experts"));
    }
}

/// Sums of products with a weight, and of their magnitudes.
fn sums(w: &[f64], x: &[f32], k: usize) -> (f64, f64) {
    let terms = w.iter().zip(&x[..k]).map(|(w, &x)| w * f64::from(x));
    terms.fold((0.0, 0.0), |(sum, most), term| (sum + term, most + term.abs()))
}

/// What each weight alone makes of rows, in f32.
fn alone(bench: &Bench<'_>, w: &Packed, x: FloatView<'_>, m: usize, bias: View<'_, f32>) -> Vec<f32> {
    let [n, _] = w.shape();
    let mut workspace = Workspace::new(bench.gpu, &bench.stream, 64 << 20).unwrap();
    bench.output(Float::F32, m * n, &mut |y| {
        let epilogue = Epilogue { bias: Some(bias), ..Default::default() };
        let workspace = Some(&mut workspace);
        let call = Call { x, w, m, epilogue, y, workspace, batch_invariant: false };
        matmul::run(bench.gpu, &bench.stream, call).unwrap();
    })
}

/// The place of each row, and where rows of each weight begin.
struct Dealt {
    assignment: Assignment,
    rows: Vec<u32>,
    ids: Vec<u32>,
    places: Vec<u32>,
}

fn dealt(bench: &Bench<'_>, random: &mut Random, weights: usize, rows: usize, product: &Grouped) -> Dealt {
    let (tile, _) = product.tile(&bench.gpu.caps(), matmul::Dealt { rows, weights, each: 1 });
    let deal = Deal { experts: weights, top_k: 1, align: product.alignment(), tiles: [tile; 2], direct: false };
    let ids: Vec<u32> = (0..rows).map(|_| random.below(weights) as u32).collect();
    let mut assignment = Assignment::allocate(bench.gpu, rows, weights, deal.align, [8; 2]).unwrap();
    assignment.assign(bench.gpu, &bench.stream, bench.upload(&ids).view(), deal).unwrap();
    let (of_places, places) = (bench.read(assignment.rows()), bench.read(assignment.places()));
    Dealt { assignment, rows: of_places, ids, places }
}

const FORMATS: [&str; 16] = [
    "w4a16-g128",
    "w4a16-g32-asym",
    "w8a16-g64",
    "w8a16-g128-asym",
    "w4a16",
    "w8a16-asym",
    "w4a8-g128",
    "w8a8",
    "w4a8-g32-asym",
    "w8a8-g64",
    "w4a16-g64",
    "w4a8-asym",
    "w3a16-g128",
    "w2a16-g64-asym",
    "w2a8-g32",
    "w3a8-g64-asym",
];

/// What a product leaves at every place, for rows `x` of k that were dealt to its weights, in outputs of a type that begin as 1e4: the
/// same bits twice, in one workspace.
fn multiplied(bench: &Bench<'_>, product: &Grouped, dealt: &Dealt, (x, x_type): (&[f32], Float), y: Float) -> Vec<f32> {
    let k = product.k();
    let of_places: Vec<f32> = dealt.rows.iter().flat_map(|&row| x[row as usize * k..][..k].to_vec()).collect();
    let gathered = bench.floats(&of_places, x_type);
    let tile = dealt.assignment.tile(0);
    let bytes = product.workspace_bytes(&bench.gpu.caps(), tile, dealt.rows.len());
    let mut workspace = Workspace::new(bench.gpu, &bench.stream, bytes).unwrap();
    let outputs = dealt.rows.len() * product.outputs();
    let mut y = bench.floats(&vec![1e4; outputs], y);
    let (list, count) = dealt.assignment.list(0);
    let mut once = || {
        let (x, to) = (gathered.view(0..of_places.len()), y.view_mut(0..outputs));
        let call = GroupedCall { list, count, listed: false, tile, x, y: to };
        product.run(bench.gpu, &bench.stream, call, &mut workspace).unwrap();
        bench.widened(y.view(0..outputs))
    };
    let (got, again) = (once(), once());
    assert_eq!(bits(&got), bits(&again), "not the same bits twice");
    got
}

/// A format, and whether files hold its codes in fewer bits: all in turns.
fn format_of(case: usize) -> (&'static str, Option<Fewer>) {
    const FEWER: [Fewer; 2] = [Fewer::FiveBits, Fewer::Table];
    let at = case % (FORMATS.len() + FEWER.len());
    FORMATS.get(at).map_or_else(|| ("w8a16-g32", Some(FEWER[at - FORMATS.len()])), |&name| (name, None))
}

fn packed(random: &mut Random, name: &str, shape: [usize; 2], x: Float, fewer: Option<Fewer>) -> QTensor {
    let mut weight = parse(name).weight;
    weight.scale = x;
    let w = with_zeros_in_bytes(random.qtensor(weight, shape, false));
    fewer.map_or(w.clone(), |fewer| fewer.of(&w))
}

/// As files hold it.
fn stored(w: &QTensor, fewer: Option<Fewer>) -> StoredTensor<'_> {
    fewer.map_or_else(|| w.into(), |fewer| fewer.stored(w))
}

#[test]
fn each_row_is_multiplied_by_its_weight() {
    for gpu in gpus().into_iter().filter(|gpu| gpu.caps().arch.multiplies(Float::F16)) {
        let (bench, mut random) = (Bench::new(&gpu), Random(72));
        for case in 0..36 {
            let ((name, fewer), x_type) = (format_of(case), half_of(&gpu, [Float::F16, Float::BF16][case / 18 % 2]));
            let (count, rows) = (1 + random.below(6), [1, 5, 20, 90, 300, 900][random.below(6)]);
            let (n, k) = (1 + random.below(700), 64 * (1 + random.below(24)));
            let k = k.next_multiple_of(parse(name).weight.group.len(k).min(128));
            let tensors: Vec<_> = (0..count).map(|_| packed(&mut random, name, [n, k], x_type, fewer)).collect();
            let act = parse(name).act;
            let mut packer = Packer::new(&gpu, &bench.stream);
            let pack = |w: &QTensor| packer.pack(&[&stored(w, fewer)], act, x_type).unwrap();
            let weights: Vec<Packed> = tensors.iter().map(pack).collect();
            let biases: Vec<Buffer<f32>> = (0..count).map(|_| bench.upload(&random.normals(n))).collect();
            let all: Vec<_> = weights.iter().zip(&biases).map(|(w, bias)| (w, Some(bias.view()))).collect();
            let product = Grouped::new(&gpu, &bench.stream, &all, x_type).unwrap().unwrap();
            let dealt = dealt(&bench, &mut random, count, rows, &product);
            let x = rounded(&random.normals(rows * k), x_type);
            let got = multiplied(&bench, &product, &dealt, (&x, x_type), Float::F32);
            for (id, w) in tensors.iter().enumerate() {
                let own: Vec<usize> = (0..rows).filter(|&row| dealt.ids[row] as usize == id).collect();
                let of_rows: Vec<f32> = own.iter().flat_map(|&row| x[row * k..][..k].to_vec()).collect();
                let want = match own.len() {
                    0 => Vec::new(),
                    m => {
                        let of_rows = bench.floats(&of_rows, x_type);
                        alone(&bench, &weights[id], of_rows.view(0..m * k), m, biases[id].view())
                    }
                };
                let values = dequantize(w);
                for (i, &row) in own.iter().enumerate() {
                    let place = dealt.places[row] as usize;
                    for output in 0..n {
                        let (_, most) = sums(&values[output * k..][..k], &x[row * k..], k);
                        let want = f64::from(want[i * n + output]);
                        let bound = (k as f64 / 16.0 + 32.0) * 2f64.powi(-23) * (1.1 * most + want.abs());
                        let what = format!("{name} {x_type}, {n} × {k}, {rows} rows of {count}, row {row}, {output}");
                        close(&[got[place * n + output]], &[want], Float::F32, bound, 0.0, &what);
                    }
                }
            }
            // What is no row's stays as it was.
            let mut free = vec![true; dealt.rows.len()];
            dealt.places.iter().for_each(|&place| free[place as usize] = false);
            let untouched = |place: usize| got[place * n..][..n].iter().all(|&v| v == 1e4);
            assert!((0..free.len()).filter(|&place| free[place]).all(untouched));
        }
    }
}

fn gate_of(case: usize) -> Gate {
    match case % 3 {
        0 => Gate::SWIGLU,
        1 => Gate { clamp: Some([1.702, 7.0]), ..Gate::SWIGLU },
        _ => Gate { activation: Activation::Relu, ..Gate::SWIGLU },
    }
}

/// `f(gate) · other`, and how far that may be off where gate and other are.
fn gated(gate: (f64, f64), other: (f64, f64), of: Gate) -> (f64, f64) {
    let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
    let (left, right) = match (of.clamp, of.activation) {
        (Some([alpha, limit]), _) => {
            let [alpha, limit] = [alpha, limit].map(f64::from);
            let g = gate.0.min(limit);
            (g * sigmoid(alpha * g), other.0.clamp(-limit, limit) + 1.0)
        }
        (None, Activation::Silu) => (gate.0 * sigmoid(gate.0), other.0),
        (None, Activation::Relu) => (gate.0.max(0.0), other.0),
        other => panic!("{other:?}"),
    };
    // No derivative is above 1.2.
    let off = 1.2 * gate.1 * (right.abs() + other.1) + left.abs() * (other.1 + 2f64.powi(-20) * right.abs());
    (left * right, off)
}

#[test]
fn gates_let_through_what_they_should() {
    for gpu in gpus().into_iter().filter(|gpu| gpu.caps().arch.multiplies(Float::F16)) {
        let (bench, mut random) = (Bench::new(&gpu), Random(73));
        for case in 0..36 {
            let ((name, fewer), x_type) = (format_of(case), half_of(&gpu, [Float::F16, Float::BF16][case / 18 % 2]));
            let (count, rows) = (1 + random.below(5), [1, 9, 60, 400, 1500][random.below(5)]);
            let (inner, k) = (8 * (1 + random.below(60)), 64 * (1 + random.below(20)));
            let k = k.next_multiple_of(parse(name).weight.group.len(k).min(128));
            let gate = gate_of(case);
            let act = parse(name).act;
            let mut draw = || packed(&mut random, name, [inner, k], x_type, fewer);
            let tensors: Vec<[QTensor; 2]> = (0..count).map(|_| [draw(), draw()]).collect();
            let mut packer = Packer::new(&gpu, &bench.stream).with_slab_bytes(1 << [30, 14][case % 2]);
            let mut pack = |pair: &[QTensor; 2]| {
                let pair = pair.each_ref().map(|w| stored(w, fewer));
                packer.pack_gated(pair.each_ref(), act, gate).unwrap()
            };
            let weights: Vec<Packed> = tensors.iter().map(&mut pack).collect();
            let biases: Vec<[Vec<f32>; 2]> = (0..count).map(|_| [(); 2].map(|()| random.normals(inner))).collect();
            let of_biases: Vec<Buffer<f32>> = biases.iter().map(|pair| bench.upload(&interleaved(pair))).collect();
            let all: Vec<_> = weights.iter().zip(&of_biases).map(|(w, bias)| (w, Some(bias.view()))).collect();
            let product = Grouped::new(&gpu, &bench.stream, &all, x_type).unwrap().unwrap();
            assert_eq!((product.outputs(), product.k()), (inner, k));
            let dealt = dealt(&bench, &mut random, count, rows, &product);
            let x = rounded(&random.normals(rows * k), x_type);
            let got = multiplied(&bench, &product, &dealt, (&x, x_type), x_type);
            // Weights that are scaled early are rounded to the type of x.
            let early = if act.is_quantized() { 0.0 } else { 2.0 * x_type.unit_roundoff() };
            for (id, pair) in tensors.iter().enumerate() {
                let own: Vec<usize> = (0..rows).filter(|&row| dealt.ids[row] as usize == id).collect();
                let of_rows: Vec<f32> = own.iter().flat_map(|&row| x[row * k..][..k].to_vec()).collect();
                if own.is_empty() {
                    continue;
                }
                let m = own.len();
                let of_rows = bench.floats(&of_rows, x_type);
                let separate = [0, 1].map(|i| {
                    let w = matmul::pack(&gpu, &bench.stream, &pair[i], act, x_type).unwrap();
                    let bias = bench.upload(&biases[id][i]);
                    (alone(&bench, &w, of_rows.view(0..m * k), m, bias.view()), dequantize(&pair[i]))
                });
                for (i, &row) in own.iter().enumerate() {
                    for output in 0..inner {
                        let [of_gate, other] = separate.each_ref().map(|(y, values)| {
                            let (_, most) = sums(&values[output * k..][..k], &x[row * k..], k);
                            let want = f64::from(y[i * inner + output]);
                            let order = (k as f64 / 16.0 + 32.0) * 2f64.powi(-23);
                            (want, order * (1.1 * most + want.abs()) + early * most)
                        });
                        let (want, bound) = gated(of_gate, other, gate);
                        let what =
                            format!("{name} {x_type}, {inner} × {k}, {rows} rows of {count}, {gate:?}, {output}");
                        let at = dealt.places[row] as usize * inner + output;
                        close(&[got[at]], &[want], x_type, bound, 0.0, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn products_alone_gate_what_they_leave() {
    for gpu in gpus().into_iter().filter(|gpu| gpu.caps().arch.multiplies(Float::F16)) {
        let (bench, mut random) = (Bench::new(&gpu), Random(75));
        for case in 0..45 {
            let (name, x_type) = (FORMATS[case % 15], half_of(&gpu, [Float::F16, Float::BF16][case / 15 % 2]));
            let m = [1, 3, 17, 64, 130, 300, 700][random.below(7)];
            let (inner, k) = (8 * (1 + random.below(200)), 64 * (1 + random.below(40)));
            let k = k.next_multiple_of(parse(name).weight.group.len(k).min(128));
            let gate = gate_of(case);
            let act = parse(name).act;
            let pair = [(); 2].map(|()| packed(&mut random, name, [inner, k], x_type, None));
            let mut packer = Packer::new(&gpu, &bench.stream);
            let w = packer.pack_gated(pair.each_ref().map(Into::into).each_ref(), act, gate).unwrap();
            assert_eq!((w.shape(), w.outputs(), w.gate()), ([2 * inner, k], inner, Some(gate)));
            let biases = [(); 2].map(|()| random.normals(inner));
            let bias = bench.upload(&interleaved(&biases));
            let x = rounded(&random.normals(m * k), x_type);
            let on_device = bench.floats(&x, x_type);
            let y_type = [x_type, Float::F32][random.below(2)];
            let early = if act.is_quantized() { 0.0 } else { 2.0 * x_type.unit_roundoff() };
            let separate = [0, 1].map(|i| {
                let w = matmul::pack(&gpu, &bench.stream, &pair[i], act, x_type).unwrap();
                let bias = bench.upload(&biases[i]);
                (alone(&bench, &w, on_device.view(0..m * k), m, bias.view()), dequantize(&pair[i]))
            });
            let mut want = Vec::with_capacity(m * inner);
            for (row, output) in (0..m).flat_map(|row| (0..inner).map(move |output| (row, output))) {
                let [of_gate, other] = separate.each_ref().map(|(y, values)| {
                    let (_, most) = sums(&values[output * k..][..k], &x[row * k..], k);
                    let want = f64::from(y[row * inner + output]);
                    let order = (k as f64 / 16.0 + 32.0) * 2f64.powi(-23);
                    (want, order * (1.1 * most + want.abs()) + early * most)
                });
                want.push(gated(of_gate, other, gate));
            }
            let problem = Problem { format: Some(w.format()), x: x_type, y: y_type, m, n: 2 * inner, k };
            let caps = w.caps(&gpu);
            let kernel = matmul::select(&caps, &problem, Some(w.layout())).unwrap();
            let mut ways: Vec<(Option<_>, bool)> = vec![(None, false), (None, true)];
            let others = kernel.candidates(&caps, &problem).unwrap();
            ways.extend((0..3).map(|_| (Some(others[random.below(others.len())].clone()), false)));
            for (way, batch_invariant) in ways {
                let what = format!("{name} {x_type} to {y_type}, {inner} × {k}, {m} rows, {gate:?}, {way:?}");
                let mut workspace = Workspace::new(&gpu, &bench.stream, 256 << 20).unwrap();
                let got = bench.output(y_type, m * inner, &mut |y| {
                    let epilogue = Epilogue { bias: Some(bias.view()), activation: Activation::None };
                    let (x, workspace) = (on_device.view(0..m * k), Some(&mut workspace));
                    let call = Call { x, w: &w, m, epilogue, y, workspace, batch_invariant };
                    match &way {
                        None => matmul::run(&gpu, &bench.stream, call).unwrap(),
                        Some(way) => matmul::run_as(kernel, way, &gpu, &bench.stream, &call).unwrap(),
                    }
                });
                for (i, (got, &(want, bound))) in got.iter().zip(&want).enumerate() {
                    close(&[*got], &[want], y_type, bound, 0.0, &format!("{what}, element {i}"));
                }
            }
        }
    }
}

#[test]
fn weights_that_do_not_go_together_are_refused() {
    for gpu in gpus().into_iter().filter(|gpu| gpu.caps().arch.multiplies(Float::F16)) {
        let (bench, mut random) = (Bench::new(&gpu), Random(74));
        let mut draw = |name: &str, shape| packed(&mut random, name, shape, Float::F16, None);
        let act = parse("w4a16-g128").act;
        let [first, second] = [(); 2].map(|()| draw("w4a16-g128", [64, 256]));
        let pack = |w: &QTensor| matmul::pack(&gpu, &bench.stream, w, act, Float::F16).unwrap();
        let mut packer = Packer::new(&gpu, &bench.stream);
        let plain = pack(&first);
        let mut pack_gated =
            |tensors: [&QTensor; 2], gate| packer.pack_gated(tensors.map(Into::into).each_ref(), act, gate);
        let gated = pack_gated([&first, &second], Gate::SWIGLU).unwrap();
        let others = pack_gated([&first, &second], Gate { clamp: Some([1.702, 7.0]), ..Gate::SWIGLU }).unwrap();
        let new = |all: &[(&Packed, Option<_>)], x| {
            Grouped::new(&gpu, &bench.stream, all, x).unwrap().map(|_| ()).map_err(|why| why.to_string())
        };
        assert!(new(&[(&plain, None)], Float::F16).is_ok());
        assert!(new(&[(&gated, None)], Float::F16).is_ok());
        assert!(new(&[(&gated, None), (&others, None)], Float::F16).unwrap_err().contains("gate"));
        assert!(new(&[], Float::F16).is_err() && new(&[(&plain, None)], Float::F32).is_err());
        for other in [draw("w4a16-g128", [128, 256]), draw("w4a16-g64", [64, 256]), draw("w8a16-g128", [64, 256])] {
            assert!(new(&[(&plain, None), (&pack(&other), None)], Float::F16).unwrap_err().contains("one shape"));
        }
        // Of two rows a product alone leaves one output, and no function comes behind their gate.
        let x = bench.floats(&[0.0; 256], Float::F16);
        let mut y = bench.floats(&[0.0; 128], Float::F32);
        let mut refused = |outputs: usize, activation| {
            let epilogue = Epilogue { bias: None, activation };
            let (x, y) = (x.view(0..256), y.view_mut(0..outputs));
            let call = Call { x, w: &gated, m: 1, epilogue, y, workspace: None, batch_invariant: false };
            matmul::run(&gpu, &bench.stream, call).unwrap_err().to_string()
        };
        assert!(refused(128, Activation::None).contains("y of 1 × 64"));
        assert!(refused(64, Activation::Relu).contains("after gates"));
        let (uneven, odd) = (draw("w4a16-g128", [72, 256]), draw("w4a16-g128", [12, 256]));
        assert!(pack_gated([&first, &uneven], Gate::SWIGLU).is_err());
        assert!(pack_gated([&odd, &odd], Gate::SWIGLU).is_err());
        assert!(pack_gated([&first, &second], Gate { gated: false, ..Gate::SWIGLU }).is_err());
    }
}
