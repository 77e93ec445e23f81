//! Structs that Rust and C++ share: those of every source are equal, and what is not does not compile.

use super::nvrtc;
use halfbyte::Error;
use halfbyte::cuda::cache::Key;
use halfbyte::cuda::matmul::KERNELS;
use halfbyte::cuda::parameters::{FieldLayout, StructLayout};
use halfbyte::cuda::sources::{Arch, Instance, Source};
use halfbyte::cuda::{conv, int8, matmul, nn};
use halfbyte::kernel::KvType;
use rayon::prelude::*;
use std::collections::HashMap;

/// An instance of every source that has parameters, for every form of them that it is compiled with.
fn one_of_each_source() -> Vec<Instance> {
    let arch = Arch::of([9, 0]);
    let products = KERNELS.iter().flat_map(|kernel| (kernel.instances)(arch));
    let convolutions = conv::KERNELS.iter().flat_map(|kernel| (kernel.instances)());
    let of_bytes = int8::KERNELS.iter().flat_map(|kernel| (kernel.instances)());
    let all = products
        .chain(convolutions)
        .chain(of_bytes)
        .chain(nn::instances(arch, None, &KvType::ALL))
        .chain(nn::instances_of_experts(arch))
        .chain(nn::instances_of_hopper())
        .chain(matmul::auxiliary());
    let all = all.filter(|instance| !instance.source.parameters.is_empty());
    let one = |instance: Instance| ((instance.source.path, instance.source.parameters[0].name), instance);
    all.map(one).collect::<HashMap<_, _>>().into_values().collect()
}

#[test]
fn structs_of_every_source_are_those_of_its_launcher() {
    let Some(nvrtc) = nvrtc() else { return };
    let instances = one_of_each_source();
    assert!(instances.len() > 25, "{}", instances.len());
    let arch: Arch = "sm_90a".parse().unwrap();
    instances.par_iter().for_each(|instance| {
        nvrtc.compile(instance, arch).unwrap_or_else(|e| panic!("{e}"));
    });
}

const TEXT: &str = "struct Inner { int c; };
struct Given { unsigned long long a; float b; Inner inner; };
__global__ void f(const Given g) {}";

const fn number(name: &'static str, offset: usize, bytes: usize) -> FieldLayout {
    FieldLayout { name, offset, bytes, nested: None, flat: false }
}

const fn nested(name: &'static str, offset: usize, of: &'static StructLayout, flat: bool) -> FieldLayout {
    FieldLayout { name, offset, bytes: of.bytes, nested: Some(of), flat }
}

static INNER: StructLayout = StructLayout { name: "Inner", bytes: 4, fields: &[number("c", 0, 4)] };
static WRONG_INNER: StructLayout = StructLayout { name: "Inner", bytes: 4, fields: &[number("d", 0, 4)] };

/// A source with this layout for `Given`.
fn with(bytes: usize, fields: &'static [FieldLayout]) -> Instance {
    let layout: &'static StructLayout = Box::leak(Box::new(StructLayout { name: "Given", bytes, fields }));
    let parameters = Box::leak(Box::new([layout]));
    Instance::new(Box::leak(Box::new(Source { path: "test/given.cu", text: TEXT, parameters })), "f")
}

#[test]
fn a_struct_that_lies_otherwise_does_not_compile_and_the_error_names_the_field() {
    static RIGHT: [FieldLayout; 3] = [number("a", 0, 8), number("b", 8, 4), nested("inner", 12, &INNER, false)];
    static FLAT: [FieldLayout; 2] = [number("a", 0, 8), nested("rest", 8, &REST, true)];
    static REST: StructLayout =
        StructLayout { name: "Rest", bytes: 8, fields: &[number("b", 0, 4), nested("inner", 4, &INNER, false)] };
    static OFFSET: [FieldLayout; 1] = [number("b", 12, 4)];
    static BYTES: [FieldLayout; 1] = [number("b", 8, 8)];
    static MISSING: [FieldLayout; 1] = [number("z", 8, 4)];
    static NESTED: [FieldLayout; 1] = [nested("inner", 12, &WRONG_INNER, false)];
    let Some(nvrtc) = nvrtc() else { return };
    let arch: Arch = "sm_80".parse().unwrap();
    for right in [with(16, &RIGHT), with(16, &FLAT)] {
        nvrtc.compile(&right, arch).unwrap_or_else(|e| panic!("{e}"));
    }
    let wrong = [
        (with(16, &OFFSET), "Given.b has 4 bytes from byte 12 on in Rust"),
        (with(16, &BYTES), "Given.b has 8 bytes from byte 8 on in Rust"),
        (with(24, &RIGHT), "Given has 24 bytes in Rust"),
        (with(16, &MISSING), "\"Given\" has no member \"z\""),
        (with(16, &NESTED), "\"Inner\" has no member \"d\""),
    ];
    for (instance, expected) in wrong {
        match nvrtc.compile(&instance, arch) {
            Err(Error::Compile { log, .. }) => {
                assert!(log.contains(expected) && log.contains("structs of test/given.cu"), "{expected}: {log}");
            }
            other => panic!("{expected}: {other:?}"),
        }
    }
}

/// Machine code of a kernel whose struct was another one is not taken out of the cache.
#[test]
fn the_key_of_the_cache_covers_layouts() {
    static FIELDS: [FieldLayout; 1] = [number("a", 0, 8)];
    let arch: Arch = "sm_80".parse().unwrap();
    let [one, other] = [16, 24].map(|bytes| Key::of(&with(bytes, &FIELDS), arch).unwrap());
    assert_ne!(one, other);
}
