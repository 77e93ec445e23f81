//! Memory, streams, graphs and launches on every device of the machine.

use super::{gpus, in_child, is_child, nvrtc};
use crate::data::Random;
use half::{bf16, f16};
use halfbyte::Error;
use halfbyte::cuda::driver::{
    Arg, Context, Event, FloatView, Function, HostWords, Launch, Module, Promotion, Stream, Swizzle, TensorMap, Tiles,
    Uploader, View, ViewMut,
};
use halfbyte::cuda::sources::{Arch, Instance, Source};
use halfbyte::cuda::{Gpu, Workspace};

static PROBE: Source = Source { path: "test/probe.cu", text: include_str!("probe.cu"), parameters: &[] };

fn function(gpu: &Gpu, expression: &str) -> Function {
    gpu.function(&Instance::new(&PROBE, expression)).unwrap()
}

#[test]
fn the_probes_compile() {
    let Some(nvrtc) = nvrtc() else { return };
    let kernels = PROBE.text.lines().filter_map(|line| line.split_once("__global__ void ")?.1.split('(').next());
    let kernels: Vec<&str> = kernels.collect();
    assert!(kernels.len() >= 7, "{kernels:?}");
    for (arch, kernel) in ["sm_75", "sm_90a"].into_iter().flat_map(|arch| kernels.iter().map(move |k| (arch, k))) {
        let instance = Instance::new(&PROBE, format!("{kernel}<1>"));
        nvrtc.compile(&instance, arch.parse().unwrap()).unwrap_or_else(|e| panic!("{e}"));
    }
}

fn read<T: bytemuck::Pod>(stream: &Stream, view: View<'_, T>) -> Vec<T> {
    let mut out = vec![T::zeroed(); view.len()];
    stream.download(view, &mut out).unwrap();
    out
}

#[test]
fn uploads_in_pieces_arrive_whole() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut uploader = Uploader::new(gpu.context());
        // Within a piece, more than two pieces, and units that a piece is no multiple of.
        for (len, unit) in
            [(0, 1), (5, 1), (1000, 8), (30_000_000, 1), (21_000_000, 3_000_000), (20_000_000, 10_000_000)]
        {
            let mut buffer = gpu.context().allocate::<u8>(len).unwrap();
            let mut next = 0;
            let write = |range: std::ops::Range<usize>, to: &mut [u8]| {
                assert_eq!((range.start, range.len()), (next, to.len()));
                assert!(range.start.is_multiple_of(unit) && range.end.is_multiple_of(unit));
                next = range.end;
                to.iter_mut().zip(range).for_each(|(to, at)| *to = (at % 251) as u8);
                Ok(())
            };
            uploader.upload(&stream, buffer.view_mut(), unit, write).unwrap();
            assert_eq!(next, len);
            let got = read(&stream, buffer.view());
            assert!(got.iter().enumerate().all(|(at, &byte)| usize::from(byte) == at % 251), "{len} by {unit}");
        }
        let mut buffer = gpu.context().allocate::<u8>(7).unwrap();
        let error = uploader.upload(&stream, buffer.view_mut(), 2, |_, _| Ok(())).unwrap_err().to_string();
        assert_eq!(error, "upload: expected a multiple of 2 bytes, got 7");
        let fail = |_: std::ops::Range<usize>, _: &mut [u8]| "sm_".parse::<Arch>().map(drop);
        assert!(uploader.upload(&stream, buffer.view_mut(), 1, fail).unwrap_err().to_string().contains("sm_80"));
    }
}

#[test]
fn copies_arrive_and_views_are_where_they_should_be() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let values: Vec<u32> = (0..1000).collect();
        let mut buffer = gpu.context().allocate::<u32>(1000).unwrap();
        stream.upload(&values, buffer.view_mut()).unwrap();
        assert_eq!(read(&stream, buffer.view()), values);
        assert_eq!(read(&stream, buffer.view().slice(10..20)), values[10..20]);
        stream.fill(buffer.view_mut().slice(990..1000), 0xff).unwrap();
        assert_eq!(read(&stream, buffer.view().slice(988..992)), [988, 989, u32::MAX, u32::MAX]);
        let mut other = gpu.context().allocate::<u32>(5).unwrap();
        stream.copy(buffer.view().slice(3..8), other.view_mut()).unwrap();
        assert_eq!(read(&stream, other.view()), [3, 4, 5, 6, 7]);
        // A caller's own pointer and stream.
        // SAFETY: the buffer lives on, and nothing else writes it.
        let own = unsafe { ViewMut::<u32>::from_raw(other.pointer() + 4, 2) };
        // SAFETY: the stream lives on.
        let own_stream = unsafe { Stream::from_raw(gpu.context(), stream.raw()) };
        own_stream.fill(own, 0).unwrap();
        assert_eq!(read(&own_stream, other.view()), [3, 0, 0, 6, 7]);
        // SAFETY: null is the default stream.
        let default = unsafe { Stream::from_raw(gpu.context(), std::ptr::null_mut()) };
        assert_eq!(read(&default, other.view()), [3, 0, 0, 6, 7]);
        // Lengths that do not fit, and nothing at all.
        assert!(stream.upload(&values, other.view_mut()).is_err());
        assert!(stream.download(other.view(), &mut []).is_err());
        let mut nothing = gpu.context().allocate::<u32>(0).unwrap();
        stream.upload(&[], nothing.view_mut()).unwrap();
        assert_eq!(read(&stream, nothing.view()), Vec::<u32>::new());
        let mut workspace = Workspace::new(&gpu, &stream, 100).unwrap();
        assert_eq!(workspace.bytes(), 100);
        let view = workspace.view_mut();
        // SAFETY: as above.
        let view = unsafe { View::<u8>::from_raw(view.pointer(), view.len()) };
        assert!(read(&stream, view).iter().all(|&byte| byte == 0));
    }
}

#[test]
fn memory_that_is_short_is_said_with_its_numbers() {
    for gpu in gpus() {
        match gpu.context().allocate::<u8>(1 << 50).unwrap_err() {
            Error::DeviceMemory { requested_bytes, free_bytes, .. } => {
                assert_eq!(requested_bytes, 1 << 50);
                assert!(free_bytes > 0 && free_bytes <= gpu.context().info().memory_bytes);
            }
            other => panic!("{other}"),
        }
        assert!(gpu.context().allocate::<u64>(usize::MAX / 4).is_err());
        let error = HostWords::new(gpu.context(), usize::MAX / 4, 0).unwrap_err().to_string();
        assert!(error.contains("a size that fits memory"), "{error}");
        let [free, total] = gpu.context().memory().unwrap();
        assert!(free <= total);
        // Nothing is broken by it.
        assert!(gpu.context().allocate::<u8>(1 << 20).is_ok());
    }
    if let Some(gpu) = gpus().first() {
        let count = Gpu::count() as u32;
        let error = Context::open(count).unwrap_err().to_string();
        assert!(error.contains(&format!("below {count}")), "{error}");
        for image in [&b""[..], b"\x7fELF", &[0x7f, b'E', b'L', b'F', 2, 1, 1], &[0xff; 4096]] {
            assert!(Module::load(gpu.context(), image).is_err());
        }
    }
}

#[test]
fn launches_events_and_graphs_do_what_was_recorded() {
    const N: usize = 1000;
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut y = gpu.context().allocate::<f32>(N).unwrap();
        stream.fill(y.view_mut(), 0).unwrap();
        let (pointer, n) = (y.pointer(), N as u32);
        let (add, after) = (function(&gpu, "add<3>"), function(&gpu, "add_after<1>"));
        let resources = add.resources().unwrap();
        assert!(resources.registers > 0 && resources.local_bytes == 0 && resources.threads >= 256);
        assert!(add.blocks_per_multiprocessor(256, 0).unwrap() >= 1);
        let launch = Launch::linear(4, 256);
        let dependent = Launch { programmatic: gpu.caps().arch.number >= 90, ..launch };
        let work = |stream: &Stream| {
            let args = [Arg::new(&pointer), Arg::new(&n)];
            // SAFETY: the parameters are the kernel's, `y` holds n elements and lives on.
            unsafe { add.launch(stream, &launch, &args) }?;
            // SAFETY: as above.
            unsafe { after.launch(stream, &dependent, &args) }
        };
        let (start, end) = (Event::new(gpu.context()).unwrap(), Event::new(gpu.context()).unwrap());
        stream.record(&start).unwrap();
        work(&stream).unwrap();
        stream.record(&end).unwrap();
        end.synchronize().unwrap();
        assert!((0.0..1.0).contains(&end.seconds_since(&start).unwrap()));
        assert_eq!(read(&stream, y.view()), vec![7.0; N]);
        let graph = stream.capture(work).unwrap();
        assert_eq!(read(&stream, y.view()), vec![7.0; N], "recorded and not done");
        for _ in 0..2 {
            // SAFETY: `y` lives on.
            unsafe { graph.launch(&stream) }.unwrap();
        }
        assert_eq!(read(&stream, y.view()), vec![49.0; N]);
        // A second stream waits for the first.
        let second = gpu.stream().unwrap();
        // SAFETY: as above.
        unsafe { graph.launch(&stream) }.unwrap();
        stream.record(&end).unwrap();
        second.wait(&end).unwrap();
        assert_eq!(read(&second, y.view()), vec![105.0; N]);
        // Work that fails while it is recorded leaves a stream that works.
        let failed = stream.capture(|_| Err(Error::Device { op: "test", cause: "on purpose".into() })).unwrap_err();
        assert_eq!(failed.to_string(), "test: on purpose");
        assert!(stream.capture(|stream| stream.synchronize()).is_err());
        // What something else ended is recorded again.
        let mut times = 0;
        let again = stream.capture(|stream| {
            times += 1;
            if times == 1 {
                let _ = stream.synchronize();
            }
            work(stream)
        });
        assert_eq!(times, 2);
        // SAFETY: `y` lives on.
        unsafe { again.unwrap().launch(&stream) }.unwrap();
        assert_eq!(read(&stream, y.view()), vec![217.0; N]);
        // A form that no device takes.
        let too_many = Launch::linear(1, 4096);
        // SAFETY: refused before anything is read.
        assert!(unsafe { add.launch(&stream, &too_many, &[Arg::new(&pointer), Arg::new(&n)]) }.is_err());
        work(&stream).unwrap();
        stream.synchronize().unwrap();
    }
}

#[test]
fn conversions_of_single_numbers_are_those_of_the_processor() {
    // All halfs and brain floats, what lies beside the middle between two neighbours, and any other bits.
    let mut bits: Vec<u32> = (0..=u16::MAX).map(|b| u32::from(b) << 16).collect();
    let neighbours = (0..0x7c00u16).map(|b| (f16::from_bits(b).to_f32() + f16::from_bits(b + 1).to_f32()) / 2.0);
    bits.extend(neighbours.flat_map(|middle| [middle, -middle]).map(f32::to_bits));
    bits.extend((0..=u16::MAX).map(|b| u32::from(b) << 16 | 0x8000));
    let mut random = Random(11);
    bits.extend((0..100_000).map(|_| random.bits() as u32));
    let beside = bits.iter().flat_map(|&b| [b.wrapping_sub(1), b, b.wrapping_add(1)]);
    let x: Vec<f32> = beside.map(f32::from_bits).collect();
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let mut on_device = gpu.context().allocate::<f32>(x.len()).unwrap();
        stream.upload(&x, on_device.view_mut()).unwrap();
        let wide = [(); 2].map(|()| gpu.context().allocate::<f32>(1 << 16).unwrap());
        let halfs = gpu.context().allocate::<f16>(x.len()).unwrap();
        let brains = gpu.context().allocate::<bf16>(x.len()).unwrap();
        let pointers = [wide[0].pointer(), wide[1].pointer(), halfs.pointer(), brains.pointer(), on_device.pointer()];
        let n = x.len() as u32;
        let mut args: Vec<Arg<'_>> = pointers.iter().map(Arg::new).collect();
        args.push(Arg::new(&n));
        // SAFETY: the parameters are the kernel's, and the buffers have the lengths that it writes.
        unsafe { function(&gpu, "convert<0>").launch(&stream, &Launch::linear(n.div_ceil(256), 256), &args) }.unwrap();
        let [from_half, from_brain] = wide.map(|wide| read(&stream, wide.view()));
        for b in 0..=u16::MAX {
            assert!(same(from_half[usize::from(b)], f16::from_bits(b).to_f32()), "half {b:#x}");
            assert!(same(from_brain[usize::from(b)], bf16::from_bits(b).to_f32()), "brain float {b:#x}");
        }
        let (halfs, brains) = (read(&stream, halfs.view()), read(&stream, brains.view()));
        for (i, &x) in x.iter().enumerate() {
            assert!(same(halfs[i].to_f32(), f16::from_f32(x).to_f32()), "{x:e} is half {}", halfs[i]);
            assert!(same(brains[i].to_f32(), bf16::from_f32(x).to_f32()), "{x:e} is brain float {}", brains[i]);
        }
    }
}

#[test]
fn shared_memory_and_clusters_are_what_was_asked_for() {
    for gpu in gpus() {
        let stream = gpu.stream().unwrap();
        let reverse = function(&gpu, "reverse<0>");
        let most = gpu.caps().shared_bytes;
        let n = most / 4;
        let y = gpu.context().allocate::<u32>(n as usize).unwrap();
        let pointer = y.pointer();
        let launch = Launch { shared_bytes: most, ..Launch::linear(1, 256) };
        let args = [Arg::new(&pointer), Arg::new(&n)];
        let more = Launch { shared_bytes: most + 1, ..launch };
        // SAFETY: refused before anything is read.
        let error = unsafe { reverse.launch(&stream, &more, &args) }.unwrap_err().to_string();
        assert_eq!(error, format!("launch: expected at most {most} bytes of shared memory, got {}", most + 1));
        assert_eq!(reverse.blocks_per_multiprocessor(256, most).unwrap(), 1);
        // SAFETY: the parameters are the kernel's, and `y` holds n elements.
        unsafe { reverse.launch(&stream, &launch, &args) }.unwrap();
        assert_eq!(read(&stream, y.view()), (0..n).rev().collect::<Vec<_>>());
        if gpu.caps().arch.number >= 90 {
            let y = gpu.context().allocate::<u32>(8).unwrap();
            let pointer = y.pointer();
            let launch = Launch { cluster: [4, 1, 1], ..Launch::linear(8, 32) };
            // SAFETY: as above, 8 elements for 8 blocks.
            unsafe { function(&gpu, "ranks<0>").launch(&stream, &launch, &[Arg::new(&pointer)]) }.unwrap();
            assert_eq!(read(&stream, y.view()), [400, 401, 402, 403, 400, 401, 402, 403]);
        }
    }
}

#[test]
fn tensor_maps_bring_boxes_with_zeros_beyond_the_edges() {
    const ROWS: usize = 13;
    const COLUMNS: usize = 136;
    for gpu in gpus().iter().filter(|gpu| gpu.caps().arch.number >= 90) {
        let stream = gpu.stream().unwrap();
        let values: Vec<f16> = (0..ROWS * COLUMNS).map(|i| f16::from_f32(i as f32)).collect();
        let mut x = gpu.context().allocate::<f16>(values.len()).unwrap();
        stream.upload(&values, x.view_mut()).unwrap();
        let tiles = Tiles {
            shape: [ROWS, COLUMNS],
            stride: COLUMNS,
            tile: [8, 64],
            swizzle: Swizzle::Bytes128,
            promotion: Promotion::default(),
        };
        let map = TensorMap::of_matrix(FloatView::F16(x.view()), &tiles).unwrap();
        let y = gpu.context().allocate::<f16>(8 * 64).unwrap();
        for [row, column] in [[0, 0], [5, 64], [8, 128], [13, 0]] {
            let (pointer, at) = (y.pointer(), [row as i32, column as i32]);
            let args = [Arg::new(&pointer), Arg::new(&map), Arg::new(&at[0]), Arg::new(&at[1])];
            // SAFETY: the parameters are the kernel's, `y` holds a box, the map's matrix lives on.
            unsafe { function(gpu, "box<0>").launch(&stream, &Launch::linear(1, 128), &args) }.unwrap();
            let got = read(&stream, y.view());
            for (i, &got) in got.iter().enumerate() {
                // The swizzle exchanges pieces of 16 bytes by the number of the row.
                let (r, c) = (i / 64, ((i % 64 / 8) ^ (i / 64 % 8)) * 8 + i % 8);
                let within = row + r < ROWS && column + c < COLUMNS;
                let want = if within { values[(row + r) * COLUMNS + column + c] } else { f16::ZERO };
                assert_eq!(got, want, "box at {row}, {column}: row {r}, column {c}");
            }
        }
        let refused = |tiles: Tiles, view: View<'_, f16>| TensorMap::of_matrix(FloatView::F16(view), &tiles).is_err();
        assert!(refused(Tiles { tile: [8, 72], ..tiles }, x.view()), "a row longer than the swizzle");
        assert!(refused(Tiles { tile: [300, 64], ..tiles }, x.view()), "too many rows");
        assert!(refused(Tiles { tile: [8, 12], ..tiles }, x.view()), "rows of no whole pieces");
        assert!(refused(Tiles { stride: 137, ..tiles }, x.view()), "rows off their places");
        assert!(refused(Tiles { shape: [ROWS + 1, COLUMNS], ..tiles }, x.view()), "more than there is");
        assert!(refused(Tiles { shape: [0, COLUMNS], ..tiles }, x.view()), "nothing");
        assert!(
            refused(Tiles { shape: [ROWS - 1, COLUMNS], ..tiles }, x.view().slice(1..values.len())),
            "off its place"
        );
    }
}

#[test]
fn a_fault_is_a_lost_device_and_no_panic() {
    const TEST: &str = "cuda::driver::a_fault_is_a_lost_device_and_no_panic";
    if !is_child() {
        if !gpus().is_empty() {
            // The fault ends this process's work on the device for good.
            in_child(TEST, &[]);
        }
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let stream = gpu.stream().unwrap();
    let y = gpu.context().allocate::<u32>(1).unwrap();
    let pointer = y.pointer();
    // SAFETY: the kernel writes where nothing is; the driver answers with an error, which is what is tested.
    unsafe { function(&gpu, "fault<1>").launch(&stream, &Launch::linear(1, 1), &[Arg::new(&pointer)]) }.unwrap();
    let error = stream.synchronize().unwrap_err();
    assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
    assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    for _ in 0..2 {
        assert!(matches!(gpu.context().allocate::<u8>(1), Err(Error::DeviceLost { .. })));
        assert!(matches!(stream.synchronize(), Err(Error::DeviceLost { .. })));
    }
}
