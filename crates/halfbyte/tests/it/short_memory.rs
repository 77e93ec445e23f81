//! Memory that is short, in a process of its own whose memory is limited: an error where weights are made or packed, not the end of the
//! process.

use crate::cuda::{in_child, is_child};
use halfbyte::conv::Geometry;
use halfbyte::format::int8::{Affine, Byte, Bytes, Int8Weight};
use halfbyte::layout::stored::StoredTensor;
use halfbyte::quantize::{Rtn, rtn, rtn_conv2d};
use halfbyte::{
    Act, Conv2d, Conv2dInt8, Cpu, Error, Floats, Format, Linear, LlmInt8Linear, QTensor, Weight, WeightFormat, Zeros,
};

fn format(name: &str) -> WeightFormat {
    name.parse::<Format>().unwrap().weight
}

/// Lets this process take so much more than it has.
fn limit(bytes: u64) {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    // SAFETY: takes no pointer.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let most = pages * page + bytes;
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: reads a struct that lives until it returns.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}

fn short<T>(result: halfbyte::Result<T>, what: &str) {
    match result {
        Err(Error::Memory { .. }) => {}
        Err(other) => panic!("{what}: {other}"),
        Ok(_) => panic!("{what}: there is memory"),
    }
}

#[test]
fn short_memory_is_an_error_where_weights_are_made_and_packed() {
    if !is_child() {
        // What is large comes from the system each time, not from what a thread has reserved.
        let test = "short_memory::short_memory_is_an_error_where_weights_are_made_and_packed";
        return in_child(test, &[("MALLOC_MMAP_THRESHOLD_", "65536"), ("MALLOC_ARENA_MAX", "1")]);
    }
    let cpu = Cpu::new(1).unwrap();
    let wide = Geometry::new(512, 4096, [3, 3]);
    let depthwise = Geometry { groups: 1 << 14, ..Geometry::new(1 << 14, 1 << 14, [32, 32]) };
    let w = vec![0f32; wide.co * wide.k()];
    let [q, of_depthwise] = [wide, depthwise].map(|Geometry { co, .. }| {
        let k = if co == wide.co { wide.k() } else { depthwise.k() };
        QTensor::new(format("w4a16"), [co, k], vec![3; co * k], vec![1.0; co], Zeros::Symmetric, None).unwrap()
    });
    let stored = StoredTensor::from(&q);
    let bytes: Vec<i8> = q.codes().iter().map(|&code| code as i8).collect();
    let halves = vec![half::f16::ONE; w.len()];
    // Codes take less than there will be, and scales, zero points and sums of codes the rest.
    let (n, k) = (4096, 3584);
    let (scales, zeros) = (vec![1.0; n * k / 32], Zeros::Integer(vec![3; n * k / 32]));
    let grouped = QTensor::new(format("w4a8-g32-asym"), [n, k], vec![3; n * k], scales, zeros, None).unwrap();
    let narrow = Geometry::new(8, 8, [3, 3]);
    let small = rtn_conv2d(Floats::F32(&w[..576]), &narrow, format("w4a16"), Rtn::default()).unwrap();
    Conv2d::on(&cpu, Weight::Quantized(&small, Act::A8), narrow).unwrap();
    StoredTensor::from(&small).to_qtensor().unwrap();
    // A thread that only now begins would find no memory for its stack of signals, which ends the process.
    rayon::broadcast(|_| ());
    limit(8 << 20);

    for act in [Act::A16, Act::A8, Act::A8Asym] {
        short(Conv2d::on(&cpu, Weight::Quantized(&q, act), wide), "a convolution");
        short(Conv2d::on(&cpu, Weight::Stored(&[&stored], act), wide), "a stored convolution");
        short(Conv2d::on(&cpu, Weight::Quantized(&of_depthwise, act), depthwise), "a depthwise one");
        short(Linear::on(&cpu, Weight::Quantized(&q, act)), "a linear layer");
        short(Linear::on(&cpu, Weight::Quantized(&grouped, act)), "a linear layer in groups");
    }
    short(Conv2d::on(&cpu, Weight::Dense(Floats::F32(&w), [wide.co, wide.k()]), wide), "a dense convolution");
    let dense = Floats::F32(&w[..depthwise.co * depthwise.k()]);
    short(Conv2d::on(&cpu, Weight::Dense(dense, [depthwise.co, depthwise.k()]), depthwise), "a dense depthwise one");
    let affine = Affine::new(Byte::U8, 1.0, 0).unwrap();
    let codes = Bytes::I8(&bytes[..depthwise.co * depthwise.k()]);
    let weight = Int8Weight::new(codes, [depthwise.co, depthwise.k()], &[1.0], &[]).unwrap();
    short(Conv2dInt8::on(&cpu, &weight, depthwise, affine, None), "a depthwise one of bytes");
    short(LlmInt8Linear::on(&cpu, &bytes, [wide.co, wide.k()], &vec![1.0; wide.co]), "LLM.int8()");

    short(wide.weight_rows(&w), "rows");
    short(rtn_conv2d(Floats::F32(&w), &wide, format("w4a16"), Rtn::default()), "rtn of a convolution");
    short(rtn(Floats::F16(&halves), [wide.co, wide.k()], format("w8a16-tensor"), Rtn::default()), "rtn of a tensor");
    short(q.express(format("w8a16")), "another format");
    short(q.rows(1..q.n()), "rows of a tensor");
    short(stored.to_qtensor(), "a tensor of a stored one");
    short(stored.values(), "values");
    short(stored.part(std::slice::from_ref(&(1..q.n())), std::slice::from_ref(&(0..q.k()))), "a part");
}
