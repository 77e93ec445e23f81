//! Layers on a GPU: the same calls as on a CPU, tensors in either memory, and recorded work.

use super::queues;
use crate::data::{Random, parse};
use crate::ops::{Typed, bytes, convolutions, products, refusals};
use half::f16;
use halfbyte::conv::{Geometry, Layout2d};
use halfbyte::cuda::driver::FloatViewMut;
use halfbyte::format::int8::{Affine, Byte, Int8Weight};
use halfbyte::{Activation, Conv2d, Conv2dInt8, Cpu, Cuda, Float, Linear, Weight};

#[test]
fn layers_on_a_gpu_are_those_of_the_reference() {
    for cuda in queues() {
        products(&cuda);
        convolutions(&cuda);
        bytes(&cuda);
        refusals(&cuda);
    }
}

#[test]
fn tensors_of_the_device_and_of_the_host_give_the_same_bits() {
    let mut random = Random(90);
    for cuda in queues() {
        for name in ["w4a16-g128", "w4a8-g128", "w8a8"] {
            let (format, [m, n, k]) = (parse(name), [17, 192, 256]);
            let w = random.qtensor(format.weight, [n, k], false);
            let linear = Linear::on(&cuda, Weight::Quantized(&w, format.act)).unwrap();
            let linear = linear.with_bias(random.normals(n)).unwrap().with_activation(Activation::Gelu);
            let x = Typed::new(&random.activations(m * k), Float::F16);
            let mut of_host = vec![0.0f32; m * n];
            linear.forward(&cuda, x.get(), m, &mut of_host).unwrap();
            let (on_device, mut y) = (cuda.upload(x.get()).unwrap(), cuda.allocate(Float::F32, m * n).unwrap());
            linear.forward(&cuda, &on_device, m, &mut y).unwrap();
            let mut of_device = vec![0.0f32; m * n];
            cuda.download(y.view(0..m * n), &mut of_device).unwrap();
            assert_eq!(of_host, of_device, "{name}");
            // From the host to the device.
            linear.forward(&cuda, x.get(), m, &mut y).unwrap();
            cuda.download(y.view(0..m * n), &mut of_device).unwrap();
            assert_eq!(of_host, of_device, "{name}, x of the host");
        }
        // Two layers without the host between them.
        let geometry = Geometry { padding: [1; 4], ..Geometry::new(64, 64, [3, 3]) };
        let format = parse("w4a16-g64");
        let w = random.qtensor(format.weight, [64, geometry.k()], false);
        let conv = Conv2d::on(&cuda, Weight::Quantized(&w, format.act), geometry).unwrap();
        let conv = conv.with_layouts(Layout2d::Nhwc, Layout2d::Nhwc);
        let len = 2 * 64 * 8 * 8;
        let x: Vec<f16> = random.normals(len).into_iter().map(|v| f16::from_f32(0.1 * v)).collect();
        let (mut between, mut here) = (vec![f16::ZERO; len], vec![0.0f32; len]);
        conv.forward(&cuda, &x, 2, [8, 8], &mut between).unwrap();
        conv.forward(&cuda, &between, 2, [8, 8], &mut here).unwrap();
        let x = cuda.upload(&x).unwrap();
        let (mut between, mut y) = (cuda.allocate(Float::F16, len).unwrap(), cuda.allocate(Float::F32, len).unwrap());
        conv.forward(&cuda, &x, 2, [8, 8], &mut between).unwrap();
        conv.forward(&cuda, &between, 2, [8, 8], &mut y).unwrap();
        let mut there = vec![0.0f32; len];
        cuda.download(y.view(0..len), &mut there).unwrap();
        assert_eq!(here, there);
    }
}

#[test]
fn work_is_recorded_with_a_workspace_that_was_reserved() {
    let (format, [n, k]) = (parse("w4a16-g128"), [4096, 4096]);
    let mut random = Random(91);
    let w = random.qtensor(format.weight, [n, k], false);
    for cuda in queues() {
        let linear = Linear::on(&cuda, Weight::Quantized(&w, format.act)).unwrap();
        let x = cuda.upload(&random.normals(k).into_iter().map(f16::from_f32).collect::<Vec<_>>()).unwrap();
        let mut y = cuda.allocate(Float::F16, n).unwrap();
        let stream = cuda.stream();
        let refused = stream.capture(|_| linear.forward(&cuda, &x, 1, &mut y)).unwrap_err().to_string();
        assert!(refused.starts_with("linear: expected a workspace of "), "{refused}");
        let host = vec![f16::ONE; k];
        cuda.reserve(16 << 20).unwrap();
        let refused = stream.capture(|_| linear.forward(&cuda, &host, 1, &mut y)).unwrap_err().to_string();
        assert!(refused.contains("tensors in device memory while work is recorded"), "{refused}");
        linear.forward(&cuda, &x, 1, &mut y).unwrap();
        let mut once = vec![f16::ZERO; n];
        cuda.download(y.view(0..n), &mut once).unwrap();
        let graph = stream.capture(|_| linear.forward(&cuda, &x, 1, &mut y)).unwrap();
        // What was recorded goes on with the workspace that it knows.
        cuda.reserve(64 << 20).unwrap();
        cuda.download(x.view(0..0), &mut [f16::ZERO; 0]).unwrap();
        stream
            .fill(
                match y.view_mut(0..n) {
                    FloatViewMut::F16(y) => y,
                    other => panic!("{other:?}"),
                },
                0xff,
            )
            .unwrap();
        // SAFETY: x, y, the weight and the queue with its workspaces live, and the replay is waited for.
        unsafe { graph.launch(stream) }.unwrap();
        let mut again = vec![f16::ZERO; n];
        cuda.download(y.view(0..n), &mut again).unwrap();
        assert_eq!(once, again);
    }
}

#[test]
fn what_no_kernel_serves_names_the_operation() {
    let mut random = Random(92);
    for cuda in queues() {
        let format = parse("w4a16-g64");
        let w = random.qtensor(format.weight, [64, 64], false);
        let linear = Linear::on(&cuda, Weight::Quantized(&w, format.act)).unwrap();
        let (x, mut y) = (vec![0.0f32; 64], vec![0.0f32; 64]);
        // cuBLASLt takes x of another type than the scales; without it no kernel does.
        match linear.forward(&cuda, &x, 1, &mut y) {
            Ok(()) => assert!(cuda.gpu().caps().cublaslt),
            Err(why) => {
                let why = why.to_string();
                let named = why.starts_with("linear: expected a problem that some kernel serves");
                assert!(named && why.contains("x is f32"), "{why}");
            }
        }
        // No rows are no work, whatever the type.
        let none = cuda.allocate(Float::F16, 0).unwrap();
        linear.forward(&cuda, &none, 0, &mut [0.0f32; 0]).unwrap();
    }
}

#[test]
fn layers_run_in_every_queue_of_their_gpu() {
    let (cpu, codes) = (Cpu::new(1).unwrap(), [3i8; 64 * 64]);
    let of = Affine::new(Byte::U8, 0.5, 3).unwrap();
    let weight = Int8Weight::new((&codes).into(), [64, 64], &[0.01], &[]).unwrap();
    let geometry = Geometry::new(64, 64, [1, 1]);
    let (x, mut here) = (vec![77u8; 64 * 9], vec![0u8; 64 * 9]);
    Conv2dInt8::new(&weight, geometry, of, of).unwrap().forward(&cpu, &x, 1, [3, 3], &mut here).unwrap();
    for cuda in queues() {
        let conv = Conv2dInt8::on(&cuda, &weight, geometry, of, Some(of)).unwrap();
        let other = Cuda::new(cuda.gpu().clone(), cuda.gpu().stream().unwrap()).unwrap();
        for queue in [&cuda, &other] {
            let mut there = vec![0u8; 64 * 9];
            conv.forward(queue, &x, 1, [3, 3], &mut there).unwrap();
            assert_eq!(here, there);
        }
    }
}
