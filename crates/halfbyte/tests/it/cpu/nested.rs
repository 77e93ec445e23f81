//! Layers called inside of tasks, while another thread calls them on the same device.

use super::noise;
use halfbyte::conv::Geometry;
use halfbyte::cpu::attention::Heads;
use halfbyte::cpu::nn::Rope;
use halfbyte::format::int8::{Affine, Byte, Bytes, BytesMut, Int8Weight};
use halfbyte::ops::{Conv2d, Conv2dInt8, Linear, LinearInt8, Weight};
use halfbyte::{Cpu, Floats};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

/// Far longer than the calls take, also on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);
const CALLS: usize = 300;

/// One thread calls as long as another one calls inside of tasks: both come to their end, with the bits of a call that is alone.
/// Calls are numbered.
fn both_end(what: &str, call: impl Fn(&Cpu, usize) -> Vec<u8> + Send + Sync + 'static) {
    let cpu = Arc::new(Cpu::new(2).unwrap());
    let (expected, of_calls) = (call(&cpu, 0), Arc::clone(&cpu));
    let same = Arc::new(move |i| call(&of_calls, i) == expected);
    let (sender, ended) = channel();
    let (plain, of_plain) = (Arc::clone(&same), sender.clone());
    let done = Arc::new(AtomicBool::new(false));
    let until = Arc::clone(&done);
    std::thread::spawn(move || {
        let mut calls = (0..CALLS).cycle();
        let all_same = calls.by_ref().take(CALLS).all(|i| plain(i));
        let more_same = calls.take_while(|_| !until.load(Ordering::Relaxed)).all(|i| plain(i));
        of_plain.send(all_same && more_same)
    });
    std::thread::spawn(move || {
        for _ in 0..CALLS {
            cpu.threads().run(4, &|i| assert!(same(i)));
        }
        done.store(true, Ordering::Relaxed);
        sender.send(true)
    });
    for _ in 0..2 {
        match ended.recv_timeout(TIMEOUT) {
            Ok(same) => assert!(same, "{what}: other bits"),
            Err(error) => panic!("{what}: {error}"),
        }
    }
}

fn bits(values: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

/// 3 × 3, with padding.
fn geometry(channels: usize, groups: usize) -> Geometry {
    Geometry { groups, padding: [1; 4], ..Geometry::new(channels, channels, [3, 3]) }
}

#[test]
fn linear_layers() {
    let (n, k, m) = (128, 128, 48);
    let layer = Linear::new(Weight::Dense(Floats::from(&noise(1, n * k)), [n, k])).unwrap();
    let x = noise(2, m * k);
    both_end("linear", move |cpu, _| {
        let mut y = vec![0.0; m * n];
        layer.forward(cpu, &x, m, &mut y).unwrap();
        bits(&y)
    });
}

#[test]
fn linear_layers_of_bytes() {
    let (n, k, m) = (64, 256, 96);
    let w: Vec<i8> = (0..n * k).map(|i| (i % 251) as i8).collect();
    let weight = Int8Weight::new(Bytes::I8(&w), [n, k], &[1.0], &[]).unwrap();
    // Signed bytes of few rows are written before the product, by the whole team.
    let affine = Affine::new(Byte::I8, 0.5, 3).unwrap();
    let layer = LinearInt8::new(&weight, affine, Affine::new(Byte::U8, 900.0, 128).unwrap()).unwrap();
    let x: Vec<i8> = (0..m * k).map(|i| (i % 239) as i8).collect();
    both_end("linear of bytes", move |cpu, _| {
        let mut y = vec![0; m * n];
        layer.forward(cpu, Bytes::I8(&x), m, BytesMut::U8(&mut y)).unwrap();
        y
    });
}

#[test]
fn convolutions() {
    for groups in [1, 16] {
        let (geometry, size) = (geometry(16, groups), [24, 24]);
        let w = noise(3, geometry.co * geometry.k());
        let layer = Conv2d::new(Weight::Dense(Floats::from(&w), [geometry.co, geometry.k()]), geometry).unwrap();
        let x = noise(4, 16 * 24 * 24);
        both_end("convolution", move |cpu, _| {
            let mut y = vec![0.0; x.len()];
            layer.forward(cpu, &x, 1, size, &mut y).unwrap();
            bits(&y)
        });
    }
}

#[test]
fn convolutions_of_bytes() {
    for groups in [1, 16] {
        let (geometry, size) = (geometry(16, groups), [24, 24]);
        let w: Vec<i8> = (0..geometry.co * geometry.k()).map(|i| (i % 251) as i8).collect();
        let weight = Int8Weight::new(Bytes::I8(&w), [geometry.co, geometry.k()], &[1.0], &[]).unwrap();
        let affine = |scale| Affine::new(Byte::U8, scale, 128).unwrap();
        let layer = Conv2dInt8::new(&weight, geometry, affine(1.0), affine(900.0)).unwrap();
        let x: Vec<u8> = (0..16 * 24 * 24).map(|i| i as u8).collect();
        both_end("convolution of bytes", move |cpu, _| {
            let mut y = vec![0; x.len()];
            layer.forward(cpu, Bytes::U8(&x), 1, size, BytesMut::U8(&mut y)).unwrap();
            y
        });
    }
}

/// The first calls of one thread are of positions that none was of before, so that it computes angles.
#[test]
fn rotations() {
    let heads = Heads { heads: 2, kv_heads: 1, head_size: 64 };
    for round in 0..16 {
        let x = noise(round, heads.row());
        // Frequencies of 0 turn nothing: the bits are those of every position.
        let rope = Rope::new(vec![0.0; 16], 1.0, 1 << 20).unwrap();
        both_end("rotation", move |cpu, i| {
            let mut qkv = x.clone();
            rope.apply(cpu, &mut qkv, heads, 1_000 * i).unwrap();
            bits(&qkv)
        });
    }
}
