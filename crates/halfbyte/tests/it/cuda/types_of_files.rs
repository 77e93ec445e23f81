//! Types of files at their own size: packed as on the CPU, made floats, multiplied by every kernel that reads the layout.

use super::gpus;
use super::matmul::{MOST, ROWS};
use super::products::{Bench, TYPES, check, reference_of};
use crate::data::{Random, rounded};
use crate::layout::types_of_files::{TypeOfFiles, types_of_files};
use halfbyte::cuda::Caps;
use halfbyte::cuda::driver::FloatViewMut;
use halfbyte::cuda::matmul::{self, Epilogue, KERNELS, Kernel, Packer, dequantize};
use halfbyte::cuda::nn::{self, Table};
use halfbyte::cuda::sources::Instance;
use halfbyte::format::reference::{self, Bound};
use halfbyte::kernel::Problem;
use halfbyte::layout::cuda_wna16::CudaWna16;
use halfbyte::{Act, Float, Format};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread;

const ACTS: [Act; 3] = [Act::A16, Act::A8, Act::A8Asym];

fn of_layout() -> &'static Kernel {
    KERNELS.iter().find(|kernel| kernel.layout == "cuda_wna16" && kernel.packs).unwrap()
}

#[test]
fn types_of_files_pack_to_the_bits_of_the_cpu() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(61);
        for (name, bits, draw) in types_of_files() {
            for heights in [&[64][..], &[1], &[300], &[40, 300, 7], &[256, 520]] {
                for k in [256, 768, 2304] {
                    let (parts, whole) = draw(&mut random, heights, k);
                    let want = CudaWna16::pack_stored(&whole, Act::A16).unwrap();
                    let parts: Vec<_> = parts.iter().collect();
                    for slab_bytes in [64 << 20, 1] {
                        let mut packer = Packer::new(&gpu, &stream).with_slab_bytes(slab_bytes);
                        let packed = packer.pack_for(of_layout(), &parts, Act::A16).unwrap();
                        let mut got = vec![0u8; want.atoms().len()];
                        stream.download(packed.memory()[0], &mut got).unwrap();
                        let differs = got.iter().zip(want.atoms()).position(|(got, want)| got != want);
                        assert_eq!(differs, None, "{name} {heights:?} × {k} of {} bytes", got.len());
                        let n: usize = heights.iter().sum();
                        assert_eq!(packed.bytes() as f64 * 8.0 / (n.next_multiple_of(64) * k) as f64, bits, "{name}");
                    }
                }
            }
        }
    }
}

#[test]
fn types_of_files_as_floats_are_those_of_the_reference() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut random = Random(62);
        for (name, _, draw) in types_of_files() {
            for [n, k] in [[64, 256], [130, 768], [5, 2304]] {
                let (_, w) = draw(&mut random, &[n], k);
                let expected = reference::dequantize(&w.to_qtensor().unwrap());
                let mut packed = Packer::new(&gpu, &stream).pack_for(of_layout(), &[&w], Act::A16).unwrap();
                let mut all = gpu.context().allocate::<f32>(n * k).unwrap();
                let mut view = FloatViewMut::F32(all.view_mut());
                dequantize::run(&gpu, &stream, &packed, 0..n, &mut view).unwrap();
                let mut got = vec![0f32; n * k];
                stream.download(all.view(), &mut got).unwrap();
                for (at, (got, want)) in got.iter().zip(&expected).enumerate() {
                    assert!(*got == *want as f32, "{name} {n} × {k}: {at} is {got}, expected {want}");
                }
                let tokens: Vec<u32> = (0..20).map(|_| random.below(n + 3) as u32).collect();
                let mut on_device = gpu.context().allocate(tokens.len()).unwrap();
                stream.upload(&tokens, on_device.view_mut()).unwrap();
                let mut rows = gpu.context().allocate::<f32>(tokens.len() * k).unwrap();
                let table = (Table::Codes(&packed), 0);
                nn::embed(&gpu, &stream, table, k, on_device.view(), 19.6, rows.view_mut()).unwrap();
                let mut got = vec![0f32; tokens.len() * k];
                stream.download(rows.view(), &mut got).unwrap();
                for (at, got) in got.iter().enumerate() {
                    let want = expected.get(tokens[at / k] as usize * k + at % k).map_or(0.0, |&w| w as f32 * 19.6);
                    assert!(*got == want, "{name} {n} × {k}: {at} is {got}, expected {want}");
                }
                assert!(packed.allow_rounded_weights(&gpu, &stream).unwrap(), "{name}");
            }
        }
    }
}

#[test]
fn products_of_types_of_files_are_within_the_bound() {
    for gpu in gpus() {
        let kernels =
            || KERNELS.iter().filter(|kernel| kernel.layout == "cuda_wna16" && (kernel.serves)(gpu.caps().arch));
        let (served, rounded_weights) = (Mutex::new(BTreeMap::new()), Mutex::new(0));
        let products_of = |(i, (name, _, draw)): (usize, TypeOfFiles)| {
            let (stream, mut random) = (gpu.stream().unwrap(), Random(63 + i as u64));
            for (s, [n, k]) in [[600, 1024], [65, 256], [320, 2560], [2176, 1536]].into_iter().enumerate() {
                let (_, w) = draw(&mut random, &[n], k);
                let q = w.to_qtensor().unwrap();
                for act in [Act::A16, [Act::A8, Act::A8Asym][(i + s) % 2]] {
                    let (x_type, out) = (TYPES[(i / 2 + s) % 3], TYPES[(i + s / 2) % 3]);
                    let format = Format { weight: q.format(), act };
                    let problem = Problem { format: Some(format), x: x_type, y: out, m: 1, n, k };
                    let Ok(mut packed) = Packer::new(&gpu, &stream).pack_for(of_layout(), &[&w], act) else { continue };
                    let x = rounded(&random.activations(MOST * k), x_type);
                    let reference = reference_of(&x, MOST, &q, act);
                    let exact = kernels().flat_map(|kernel| [(kernel, false, false), (kernel, true, false)]);
                    for (kernel, batch_invariant, rounding) in
                        exact.chain(kernels().map(|kernel| (kernel, false, true)))
                    {
                        let bench = Bench { batch_invariant, ..Bench::new(kernel, &gpu, &stream) };
                        if rounding && !packed.allow_rounded_weights(&gpu, &stream).unwrap() {
                            assert!(act != Act::A16, "{name}");
                            continue;
                        }
                        let caps = packed.caps(&gpu);
                        // Weights are rounded for many rows only.
                        for &m in ROWS.iter().filter(|&&m| !rounding || m > 64) {
                            let problem = Problem { m, ..problem };
                            let Ok(configuration) = kernel.choose(&caps, &problem, batch_invariant) else { continue };
                            let y = bench.forward(&packed, &x[..m * k], [x_type, out], m, Epilogue::default());
                            let bound = match batch_invariant {
                                true => Bound::new(out, k),
                                false => kernel.bound(&caps, &problem),
                            };
                            let what =
                                format!("{name}, {} by {configuration}: {problem} {batch_invariant}", kernel.name);
                            check(&y, &reference, bound, &what);
                            *rounded_weights.lock().unwrap() += usize::from(bound.rounded_weights.is_some());
                            *served.lock().unwrap().entry(kernel.name).or_insert(0) += 1;
                        }
                    }
                }
            }
        };
        // Most of the time takes compiling, which threads do side by side.
        thread::scope(|scope| {
            let start = |of| scope.spawn(|| products_of(of));
            let all: Vec<_> = types_of_files().into_iter().enumerate().map(start).collect();
            all.into_iter().for_each(|of| of.join().unwrap());
        });
        let (of_tensor_cores, served) = (kernels().filter(|kernel| kernel.packs), served.into_inner().unwrap());
        of_tensor_cores.for_each(|kernel| assert!(served[kernel.name] > 100, "{}: {served:?}", kernel.name));
        assert!(rounded_weights.into_inner().unwrap() > 50);
    }
}

/// Without a device: quantised and exact activations both have kernels, and none of more than one row is scalar.
#[test]
fn every_kernel_reads_types_of_files() {
    let mut random = Random(64);
    for (name, _, draw) in types_of_files() {
        let (_, w) = draw(&mut random, &[64], 256);
        for (arch, act) in ["sm_75", "sm_80", "sm_90a"].into_iter().flat_map(|arch| ACTS.map(|act| (arch, act))) {
            let atom = CudaWna16::pack_stored(&w, act).unwrap().atom();
            let caps = Caps { atom: Some(atom), ..super::products::caps(arch) };
            let format = Some(Format { weight: w.format(), act });
            let problem = Problem { format, x: Float::F16, y: Float::F32, m: 1, n: 4096, k: 4096 };
            for m in [1, 8, 16, 64, 256, 2048] {
                let kernel = matmul::select(&caps, &Problem { m, ..problem }, Some("cuda_wna16")).unwrap();
                assert_ne!(kernel.name, "simt", "{name} {act:?} {m} {arch}");
                let instances = kernel.instances_of(&caps, &Problem { m, ..problem });
                let own = |instance: &Instance| {
                    ["MULTIPLES", "BITS=5", "TABLE_0"].iter().any(|of| instance.to_string().contains(of))
                };
                let own = instances.iter().any(own);
                // Beside quantised activations codes of Q5_0 and Q5_1 and of tables are bytes.
                let as_bytes = act.is_quantized() && !atom.multiples;
                assert!(own || as_bytes || kernel.name == "dequantize_cublaslt", "{name} {act:?} {m}: {instances:?}");
            }
        }
    }
}
