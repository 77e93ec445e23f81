//! Layers of experts one after the other: a kernel may begin, and read the list of who has which rows, while those before it end.

use super::{Bench, bits, single};
use crate::cuda::{half_of, queues};
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use halfbyte::Float;
use halfbyte::cuda::matmul::{Grouped, GroupedCall, Packed, Packer};
use halfbyte::cuda::nn::{self, Assignment, ChosenRows, Deal, ExpertLayer, FloatBuffer, Gate};

/// Launches that wait for nothing but each other.
const LAUNCHES: usize = 16;

#[test]
fn layers_in_a_row_have_the_bits_of_launches_one_by_one() {
    for cuda in queues().into_iter().filter(|cuda| cuda.gpu().caps().arch.multiplies(Float::F16)) {
        let (gpu, stream) = (cuda.gpu(), cuda.stream());
        let (bench, mut random) = (Bench::new(gpu), Random(73));
        let formats = ["w4a16-g128", "w8a16-g32-asym", "w4a8-g128", "w8a8-g64", "w4a16-g64-asym"];
        for case in 0..15 {
            let (format, x_type) = (parse(formats[case % 5]), half_of(gpu, [Float::F16, Float::BF16][case / 5 % 2]));
            let weight = halfbyte::WeightFormat { scale: x_type, ..format.weight };
            let (experts, rows) = (2 + random.below(24), 2 + random.below([12, 90][case % 2]));
            let top_k = 1 + random.below(experts.min(6));
            let [hidden, width] = [(); 2].map(|()| 128 * (1 + random.below([3, 12][case % 2])));
            let mut packer = Packer::new(gpu, stream);
            let mut draw = |shape| with_zeros_in_bytes(random.qtensor(weight, shape, false)).into();
            let packed: Vec<[Packed; 2]> = (0..experts)
                .map(|_| {
                    let [gate, other, down] = [draw([width, hidden]), draw([width, hidden]), draw([hidden, width])];
                    let up = packer.pack_gated([&gate, &other], format.act, Gate::SWIGLU).unwrap();
                    [up, packer.pack(&[&down], format.act, x_type).unwrap()]
                })
                .collect();
            let [up, down] = [0, 1].map(|i| packed.iter().map(|w| (&w[i], None)).collect::<Vec<_>>());
            let layer = ExpertLayer::new(gpu, stream, [&up, &down], top_k, x_type).unwrap().unwrap();
            let products = [&up, &down].map(|w| Grouped::new(gpu, stream, w, x_type).unwrap().unwrap());
            let tile = [8, 16, 32][case % 3];
            let layer = layer.in_tiles(tile).unwrap();

            // All choose few of the experts, or any.
            let crowd = if case % 2 == 0 { top_k + random.below(experts - top_k + 1) } else { experts };
            let mut choose = || {
                let first = random.below(crowd);
                (0..top_k).map(|i| ((first + i) % crowd) as u32).collect::<Vec<_>>()
            };
            let ids: Vec<Vec<u32>> = (0..LAUNCHES).map(|_| (0..rows).flat_map(|_| choose()).collect()).collect();
            let ids: Vec<_> = ids.iter().map(|ids| bench.upload(ids)).collect();
            let x: Vec<_> =
                (0..LAUNCHES).map(|_| bench.floats(&rounded(&random.normals(rows * hidden), x_type), x_type)).collect();
            let shares = bench.upload(&random.normals(rows * top_k));
            let chosen =
                |i: usize| ChosenRows { x: x[i].view(0..rows * hidden), ids: ids[i].view(), shares: shares.view() };
            let mut room = ExpertLayer::room(&cuda, &[&layer], rows).unwrap();
            let mut left: Vec<_> = (0..LAUNCHES).map(|_| bench.upload(&vec![1e4f32; rows * hidden])).collect();
            bench.stream.synchronize().unwrap();
            for (i, left) in left.iter_mut().enumerate() {
                layer.forward(&cuda, chosen(i), &mut room, left.view_mut()).unwrap();
            }
            stream.synchronize().unwrap();

            let align = products.iter().map(Grouped::alignment).max().unwrap();
            let deal = Deal { experts, top_k, align, tiles: [tile; 2], direct: false };
            let places = deal.places(rows * top_k);
            let mut assignment = Assignment::allocate(gpu, rows * top_k, experts, align, [8; 2]).unwrap();
            let [mut gathered, mut inner] =
                [hidden, width].map(|row| FloatBuffer::allocate(gpu, x_type, places * row).unwrap());
            let mut of_experts = bench.upload(&vec![0f32; places * hidden]);
            bench.stream.synchronize().unwrap();
            for (i, left) in left.iter().enumerate() {
                let ChosenRows { x, ids, shares } = chosen(i);
                assignment.assign(gpu, stream, ids, deal).unwrap();
                stream.synchronize().unwrap();
                let to = gathered.view_mut(0..places * hidden);
                nn::gather(gpu, stream, x, hidden, assignment.rows(), to).unwrap();
                stream.synchronize().unwrap();
                let (list, count) = assignment.list(0);
                let (x, y) = (gathered.view(0..places * hidden), inner.view_mut(0..places * width));
                products[0].forward(&cuda, GroupedCall { list, count, listed: false, tile, x, y }).unwrap();
                stream.synchronize().unwrap();
                let (list, count) = assignment.list(1);
                let (x, y) = (inner.view(0..places * width), of_experts.view_mut().into());
                products[1].forward(&cuda, GroupedCall { list, count, listed: false, tile, x, y }).unwrap();
                stream.synchronize().unwrap();
                let want = bench.output(Float::F32, rows * hidden, &mut |out| {
                    bench.stream.synchronize().unwrap();
                    let by = (assignment.places(), shares);
                    nn::combine_experts(gpu, stream, of_experts.view(), hidden, by, single(out)).unwrap();
                    stream.synchronize().unwrap();
                });
                let what = format!("{} experts of {width} × {hidden}, {rows} rows", formats[case % 5]);
                assert_eq!(bits(&bench.read(left.view())), bits(&want), "{what}, launch {i}");
            }
        }
    }
}
