//! What ranks tell each other, as threads of one process that share a GPU, each with a stream of its own.

use super::Bench;
use crate::cuda::gpus;
use crate::data::Random;
use halfbyte::cuda::driver::{Buffer, View};
use halfbyte::cuda::nn::{self, Collectives, LayerNorm, Mailbox, Norm, Update};
use halfbyte::kernel::KvType;
use halfbyte::{Error, Float};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lengths of calls that follow each other: less than a vector, many blocks, more than a launch takes.
const LENGTHS: [usize; 7] = [1, 3, 4, 1000, 14_336, (1 << 20) + 5, 77];

/// What waits on a device for a rank holds up what others put there: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// So many ranks on a GPU; each does some work, with its number and its end, once all are ready.
fn ranks<T: Send>(
    bench: &Bench<'_>,
    size: usize,
    work: impl Fn(usize, &Bench<'_>, Collectives, &Barrier) -> T + Sync,
) -> Vec<T> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // A kernel that is loaded while others wait for it would wait for them.
    bench.gpu.prepare(&nn::instances_of_ranks(), |_| ()).unwrap();
    let (all, addresses) = (&Barrier::new(size), &Mutex::new(vec![Vec::new(); size]));
    let (work, gpu) = (&work, bench.gpu);
    let rank = |number: usize| {
        move || {
            let bench = Bench::new(gpu);
            let mailbox = Mailbox::new(gpu, &bench.stream, size).unwrap();
            addresses.lock().unwrap()[number] = mailbox.address(gpu).unwrap();
            all.wait();
            let known = addresses.lock().unwrap().clone();
            let end = Collectives::new(gpu, &bench.stream, mailbox, number, &known).unwrap();
            bench.stream.synchronize().unwrap();
            all.wait();
            work(number, &bench, end, all)
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size).map(|number| scope.spawn(rank(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() }).collect()
}

fn downloaded(bench: &Bench<'_>, buffers: &[Buffer<f32>]) -> Vec<Vec<f32>> {
    buffers.iter().map(|buffer| bench.read(buffer.view())).collect()
}

#[test]
fn sums_over_ranks_are_those_in_their_order() {
    for gpu in gpus() {
        for size in [1, 2, 3, 5] {
            let values = |rank: usize, call: usize| {
                let mut values = Random(100 * rank as u64 + call as u64).normals(LENGTHS[call % LENGTHS.len()]);
                if rank == 1 && call == 3 {
                    // One of them is what says that nothing has come.
                    (values[0], values[1], values[2]) = (f32::from_bits(!0), f32::INFINITY, -0.0);
                }
                values
            };
            let calls = 3 * LENGTHS.len();
            let all = ranks(&Bench::new(&gpu), size, |rank, bench, end, all| {
                let mut own: Vec<_> = (0..calls).map(|call| bench.upload(&values(rank, call))).collect();
                // To others that are added to, in each second call.
                let before = |call: usize| Random(call as u64).normals(LENGTHS[call % LENGTHS.len()]);
                let mut into: Vec<_> = (0..calls).map(|call| bench.upload(&before(call))).collect();
                all.wait();
                for (call, (own, into)) in own.iter_mut().zip(&mut into).enumerate() {
                    match call % 2 {
                        0 => end.all_reduce(&gpu, &bench.stream, own.view_mut()).unwrap(),
                        _ => {
                            end.all_reduce_into(&gpu, &bench.stream, own.view_mut(), into.view_mut()).unwrap();
                            std::mem::swap(own, into);
                        }
                    }
                }
                all.wait();
                let sums = downloaded(bench, &own);
                end.heard().unwrap();
                all.wait();
                sums
            });
            for call in 0..calls {
                let of_ranks: Vec<Vec<f32>> = (0..size).map(|rank| values(rank, call)).collect();
                let sum = |i: usize| of_ranks.iter().fold(0.0f32, |sum, values| sum + values[i]);
                let added: Vec<f32> = match call % 2 {
                    0 => vec![],
                    _ => Random(call as u64).normals(LENGTHS[call % LENGTHS.len()]),
                };
                let want: Vec<f32> =
                    (0..of_ranks[0].len()).map(|i| added.get(i).map_or(sum(i), |added| added + sum(i))).collect();
                for (rank, sums) in all.iter().enumerate() {
                    assert_eq!(bits(&sums[call]), bits(&want), "{size} ranks, rank {rank}, call {call}");
                }
            }
        }
    }
}

/// A norm that adds up by itself leaves what one behind a sum does.
#[test]
fn norms_of_sums_over_ranks_are_those_of_their_sums() {
    for gpu in gpus() {
        for [m, d] in [[1, 5], [1, 384], [3, 1000], [1, 14_336], [4, 4096], [2, 20_001]] {
            let stream = |i: usize| Random(i as u64).activations(m * d);
            let [x, weight, bias] = [stream(1), Random(2).normals(d), Random(3).normals(d)];
            let all = ranks(&Bench::new(&gpu), 3, |rank, bench, end, all| {
                assert!(end.sums_in_norm(m, d) && !end.sums_in_norm(1 << 10, d.max(2000)));
                let [residual, mut sum, weight, bias] =
                    [&x, &Random(10 + rank as u64).normals(m * d), &weight, &bias].map(|values| bench.upload(values));
                let update = bench.upload(&bench.read(sum.view()));
                // Of each norm, with a sum before it and without: the stream and what is left.
                let mut streams: Vec<_> = (0..4).map(|_| bench.upload(&bench.read(residual.view()))).collect();
                let mut left: Vec<_> = (0..4).map(|_| bench.floats(&vec![0.0; m * d], Float::F32)).collect();
                let instances = nn::instances(bench.gpu.caps().arch, Some(64), &KvType::ALL)
                    .into_iter()
                    .chain(nn::instances_of_some_models(bench.gpu.caps().arch, Some(64), &KvType::ALL));
                gpu.prepare(&instances.collect::<Vec<_>>(), |_| ()).unwrap();
                all.wait();
                end.all_reduce(&gpu, &bench.stream, sum.view_mut()).unwrap();
                for (i, (residual, out)) in streams.iter_mut().zip(&mut left).enumerate() {
                    let update = match i % 2 {
                        0 => Update { values: update.view(), ranks: Some(&end) },
                        _ => sum.view().into(),
                    };
                    let (residual, weight, update) = (residual.view_mut(), weight.view(), Some(update));
                    let (eps, out) = (1e-5, out.view_mut(0..m * d));
                    if i < 2 {
                        let norm = Norm { residual, update, weight, eps, out, exact: None, next: None };
                        nn::rms_norm(&gpu, &bench.stream, norm).unwrap();
                    } else {
                        let norm = LayerNorm { weight, bias: bias.view(), eps };
                        norm.apply(&gpu, &bench.stream, residual, update, out).unwrap();
                    }
                }
                let left = left.iter().map(|out| bits(&bench.widened(out.view(0..m * d)))).collect::<Vec<_>>();
                let streams = downloaded(bench, &streams).iter().map(|values| bits(values)).collect::<Vec<_>>();
                end.heard().unwrap();
                all.wait();
                [left, streams]
            });
            for [left, streams] in &all {
                for of in [left, streams] {
                    assert!(of[0] == of[1] && of[2] == of[3], "{m} × {d}");
                }
                assert_eq!([left, streams], [&all[0][0], &all[0][1]], "{m} × {d}: ranks differ");
            }
        }
    }
}

/// A rank forms the sums of its own rows, and every rank gets those of the others.
#[test]
fn rows_that_ranks_divide_come_together() {
    for gpu in gpus() {
        for (size, [m, d]) in [(2, [513, 2048]), (3, [100, 14_336]), (5, [601, 2008])] {
            let values = |rank: usize| Random(7 + rank as u64).normals(m * d);
            let before = Random(1).normals(m * d);
            let all = ranks(&Bench::new(&gpu), size, |rank, bench, end, all| {
                let [own, mut into, mut whole] = [&values(rank), &before, &before].map(|values| bench.upload(values));
                let mut half = bench.floats(&values(rank), Float::F16);
                let rows = end.own_rows(m, d).unwrap();
                assert!(end.own_rows(8, d).is_none() && end.own_rows(m, d + 1).is_none());
                all.wait();
                let (gpu, stream) = (&gpu, &bench.stream);
                for into in [&mut into, &mut whole] {
                    end.reduce_scatter_into(gpu, stream, own.view(), into.view_mut(), [m, d]).unwrap();
                }
                end.all_gather_rows(gpu, stream, whole.view_mut().into(), [m, d]).unwrap();
                end.all_gather_rows(gpu, stream, half.view_mut(0..m * d), [m, d]).unwrap();
                // A download may keep the others from the driver while it waits for them.
                all.wait();
                let [scattered, sums] = [&into, &whole].map(|values| bench.read(values.view()));
                let halves = bench.widened(half.view(0..m * d));
                end.heard().unwrap();
                all.wait();
                (rows, scattered, sums, halves)
            });
            let of_ranks: Vec<Vec<f32>> = (0..size).map(values).collect();
            let sum = |i: usize| before[i] + of_ranks.iter().fold(0.0f32, |sum, values| sum + values[i]);
            let want: Vec<f32> = (0..m * d).map(sum).collect();
            let rows: Vec<_> = all.iter().flat_map(|(rows, ..)| rows.clone()).collect();
            assert!(rows == (0..m).collect::<Vec<_>>(), "{size} ranks, {m} rows");
            for (rank, (rows, scattered, sums, halves)) in all.iter().enumerate() {
                assert!(bits(sums) == bits(&want), "{size} ranks, rank {rank}: sums");
                for i in 0..m * d {
                    let own = rows.contains(&(i / d));
                    assert_eq!(scattered[i], if own { want[i] } else { before[i] }, "{size} ranks, rank {rank}, {i}");
                    let of = all.iter().position(|(rows, ..)| rows.contains(&(i / d))).unwrap();
                    let want = half::f16::from_f32(of_ranks[of][i]).to_f32();
                    assert_eq!(halves[i], want, "{size} ranks, rank {rank}: halves, {i}");
                }
            }
        }
    }
}

#[test]
fn columns_of_ranks_lie_side_by_side() {
    for gpu in gpus() {
        for widths in [&[5usize, 4][..], &[33, 32, 32], &[70_001, 70_000], &[600_000, 600_000]] {
            let (size, row, m) = (widths.len(), widths.iter().sum::<usize>(), 7);
            let value = |rank: usize, i: usize| (rank * 10_000_000 + i) as f32;
            let all = ranks(&Bench::new(&gpu), size, |rank, bench, end, all| {
                let own: Vec<f32> = (0..m * widths[rank]).map(|i| value(rank, i)).collect();
                let own = bench.upload(&own);
                let mut out: Vec<Buffer<f32>> = (0..3).map(|_| bench.upload(&vec![0.0; m * row])).collect();
                all.wait();
                for (calls, out) in out.iter_mut().enumerate() {
                    // Of fewer rows, too.
                    let rows = m - calls;
                    let own: View<'_, f32> = own.view().slice(0..rows * widths[rank]);
                    end.all_gather(&gpu, &bench.stream, own, widths, out.view_mut().slice(0..rows * row)).unwrap();
                }
                let got = downloaded(bench, &out);
                end.heard().unwrap();
                let error = end.all_gather(&gpu, &bench.stream, own.view(), &widths[1..], out[0].view_mut());
                assert!(matches!(error, Err(Error::Invalid { .. })));
                all.wait();
                got
            });
            let mut want = Vec::new();
            for i in 0..m {
                for (rank, &width) in widths.iter().enumerate() {
                    want.extend((0..width).map(|column| value(rank, i * width + column)));
                }
            }
            for got in &all {
                for (calls, got) in got.iter().enumerate() {
                    let there = (m - calls) * row;
                    assert!(got[..there] == want[..there] && got[there..].iter().all(|&v| v == 0.0), "{widths:?}");
                }
            }
        }
    }
}

#[test]
fn a_rank_that_is_silent_is_found() {
    for gpu in gpus() {
        let all = ranks(&Bench::new(&gpu), 3, |rank, bench, end, all| {
            let mut own = bench.upload(&[1.0f32; 5000]);
            all.wait();
            let begun = Instant::now();
            for _ in 0..if rank == 2 { 0 } else { 40 } {
                end.all_reduce(&gpu, &bench.stream, own.view_mut()).unwrap();
            }
            bench.stream.synchronize().unwrap();
            all.wait();
            (end.heard(), begun.elapsed())
        });
        assert_eq!([0, 1, 2].map(|rank| all[rank].0), [Err(2), Err(2), Ok(())]);
        let took = all.iter().map(|(_, took)| *took).max();
        assert!(took < Some(Duration::from_secs(20)), "calls behind one that failed wait too");
    }
}

#[test]
fn addresses_of_others_are_refused() {
    for gpu in gpus() {
        let bench = Bench::new(&gpu);
        let mailbox = || Mailbox::new(&gpu, &bench.stream, 2).unwrap();
        let own = mailbox().address(&gpu).unwrap();
        let mut elsewhere = own.clone();
        elsewhere[..36].copy_from_slice(&[b'x'; 36]);
        for (addresses, what) in [
            (vec![own.clone()], "2 ranks"),
            (vec![own.clone(), own[..9].to_vec()], "address"),
            (vec![own, elsewhere], "host"),
        ] {
            let error = Collectives::new(&gpu, &bench.stream, mailbox(), 0, &addresses).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
        assert!(Mailbox::new(&gpu, &bench.stream, 17).is_err());
    }
}
