//! Headers: what a foreign writer said is read, and files that lie are errors that name the key or tensor.

use super::tiny;
use crate::support::{assert_names, text_of};
use halfbyte_checkpoint::gguf::{Array, GgmlType, Header, Value, parse};
use halfbyte_checkpoint::{Error, Result};
use std::path::Path;

/// A file as a writer would make it, or one that lies.
pub struct Maker {
    pub version: u32,
    pub tensors: u64,
    pub pairs: u64,
    pub header: Vec<u8>,
    pub data: usize,
}

pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Maker {
    pub fn new() -> Self {
        Self { version: 3, tensors: 0, pairs: 0, header: Vec::new(), data: 0 }
    }

    /// Adds a pair whose value is these bytes.
    pub fn pair(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.pairs += 1;
        self.header.extend(string(key));
        self.header.extend(kind.to_le_bytes());
        self.header.extend(value);
        self
    }

    /// Adds a tensor; dimensions innermost first, as files have them.
    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        self.tensors += 1;
        self.header.extend(string(name));
        self.header.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|d| self.header.extend(d.to_le_bytes()));
        self.header.extend(kind.to_le_bytes());
        self.header.extend(offset.to_le_bytes());
        self
    }

    pub fn data(mut self, bytes: usize) -> Self {
        self.data = bytes;
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.tensors.to_le_bytes());
        bytes.extend(self.pairs.to_le_bytes());
        bytes.extend(&self.header);
        bytes.resize(bytes.len().next_multiple_of(32) + self.data, 0);
        bytes
    }

    pub fn parse(&self) -> Result<Header> {
        parse(&self.bytes(), Path::new("hostile.gguf"))
    }
}

#[test]
fn a_foreign_file_is_read() {
    let (bytes, header) = tiny();
    assert_eq!((header.version, header.alignment), (3, 32));
    let text = |text: &str| Some(Value::String(text.to_owned()));
    assert_eq!(header.metadata[0], ("general.architecture".into(), Value::String("llama".into())));
    let cases = [
        ("general.name", text("Tiny Llama")),
        ("llama.block_count", Some(Value::U32(2))),
        ("llama.attention.layer_norm_rms_epsilon", Some(Value::F32(1e-5))),
        ("tokenizer.ggml.add_bos_token", Some(Value::Bool(true))),
        ("test.u8", Some(Value::U8(200))),
        ("test.i8", Some(Value::I8(-100))),
        ("test.u16", Some(Value::U16(60000))),
        ("test.i16", Some(Value::I16(-30000))),
        ("test.i32", Some(Value::I32(-2_000_000_000))),
        ("test.u64", Some(Value::U64(1 << 63))),
        ("test.i64", Some(Value::I64(-(1 << 62)))),
        ("test.f64", Some(Value::F64(0.1))),
        ("test.bools", Some(Value::Array(Array::Bool(vec![true, false])))),
        ("test.texts", Some(Value::Array(Array::String(vec![String::new(), "ä".into()])))),
        ("test.none", None),
    ];
    for (key, want) in cases {
        assert_eq!(header.get(key), want.as_ref(), "{key}");
    }
    let gate = header.tensor("blk.1.ffn_gate.weight").unwrap();
    assert_eq!((gate.ggml_type, gate.shape.as_slice()), (GgmlType::Q4_1, &[96, 64][..]));
    assert_eq!(gate.range.len(), 96 * 64 / 32 * 20);
    assert!(header.tensors.iter().all(|t| t.range.start % 32 == 0 && t.range.end <= bytes.len()));
    assert_eq!(header.tensors.len(), 23);
}

/// Every shorter file is an error, never a panic or a header.
#[test]
fn a_file_cut_anywhere_is_refused() {
    let (bytes, header) = tiny();
    let data = header.tensors[0].range.start;
    let cuts = (0..data).step_by(7).chain([data, bytes.len() / 2, header.tensors.last().unwrap().range.end - 1]);
    for cut in cuts {
        let result = parse(&bytes[..cut], Path::new("cut.gguf"));
        assert!(matches!(result, Err(Error::Malformed { .. })), "cut at {cut}: {result:?}");
    }
}

/// No byte of a header may be able to make the parser panic or take memory without bound.
#[test]
fn a_header_with_any_byte_changed_is_read_or_refused() {
    let (bytes, header) = tiny();
    let end = header.tensors[0].range.start;
    for at in 0..end {
        // Texts are most of the header; their bytes are of no consequence.
        if at > 2000 && at + 2000 < end && at % 13 != 0 {
            continue;
        }
        for change in [0xff, 0x80, 0x01] {
            let mut bytes = bytes[..end + 64].to_vec();
            bytes[at] ^= change;
            let _ = parse(&bytes, Path::new("changed.gguf"));
        }
    }
}

#[test]
fn versions_and_counts() {
    let with = |version: u32, tensors: u64, pairs: u64| {
        Maker { version, tensors, pairs, header: Vec::new(), data: 64 }.parse()
    };
    for (result, part) in [
        (with(1, 0, 0), "GGUF version 1;"),
        (with(4, 0, 0), "GGUF version 4;"),
        (with(0, 0, 0), "GGUF version 0;"),
        (with(3 << 24, 0, 0), "big-endian"),
    ] {
        assert!(matches!(result, Err(Error::Unsupported { .. })), "{result:?}");
        assert_names(&text_of(result), &["hostile.gguf", part]);
    }
    assert_eq!(with(2, 0, 0).unwrap().version, 2);
    for (tensors, pairs, part) in [
        (u64::MAX, 0, "18446744073709551615 tensors"),
        (0, u64::MAX, "18446744073709551615 metadata pairs"),
        (4, 0, "4 tensors"),
        (0, 8, "8 metadata pairs"),
        (1 << 60, 1 << 60, "metadata pairs"),
    ] {
        assert_names(&text_of(with(3, tensors, pairs)), &["hostile.gguf", part]);
    }
    for bytes in [&b""[..], b"GGU", b"GGML\x03\0\0\0", b"{\"a\": 1}"] {
        assert_names(&text_of(parse(bytes, Path::new("hostile.gguf"))), &["hostile.gguf", "begins with `GGUF`"]);
    }
}

#[test]
fn metadata_that_lies() {
    let u64s = |numbers: &[u64]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
    let array = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let nested = (0..9).flat_map(|_| array(9, 1)).collect::<Vec<u8>>();
    let texts = [array(8, 2), string("a"), u64s(&[1 << 40])].concat();
    let cases: [(Maker, &[&str]); 17] = [
        (Maker::new().pair("k", 13, &[0; 8]), &["key `k`", "type", "got 13"]),
        (Maker::new().pair("k", 7, &[2]), &["key `k`", "boolean", "got 2"]),
        (Maker::new().pair("k", 8, &u64s(&[u64::MAX])), &["key `k`", "18446744073709551615 bytes of text"]),
        (Maker::new().pair("k", 8, &[&u64s(&[2])[..], &[0xff, 0xfe]].concat()), &["key `k`", "UTF-8"]),
        (Maker::new().pair("k", 9, &array(10, 1 << 61)), &["key `k`", "2305843009213693952 numbers"]),
        (Maker::new().pair("k", 9, &array(0, u64::MAX)), &["key `k`", "numbers"]),
        (Maker::new().pair("k", 9, &array(8, 1 << 32)), &["key `k`", "4294967296 strings"]),
        (Maker::new().pair("k", 9, &array(9, 1 << 32)), &["key `k`", "4294967296 arrays"]),
        (Maker::new().pair("k", 9, &array(7, 1 << 32)), &["key `k`", "4294967296 booleans"]),
        (Maker::new().pair("k", 9, &array(77, 0)), &["key `k`", "element's type", "got 77"]),
        (Maker::new().pair("k", 9, &texts), &["key `k`", "string 1"]),
        (Maker::new().pair("k", 9, &nested), &["key `k`", "at most 4 deep"]),
        (Maker::new().pair("", 0, &[1]).data(32), &["metadata pair 0", "empty"]),
        (Maker::new().pair("k", 0, &[1]).pair("k", 0, &[1]), &["key `k` is there twice"]),
        (Maker::new().pair("general.alignment", 4, &[0; 4]), &["general.alignment", "power of two", "U32(0)"]),
        (Maker::new().pair("general.alignment", 4, &[24, 0, 0, 0]), &["general.alignment", "U32(24)"]),
        (Maker::new().pair("general.alignment", 10, &u64s(&[32])), &["general.alignment", "U64(32)"]),
    ];
    for (maker, parts) in cases {
        assert_names(&text_of(maker.parse()), &["hostile.gguf"]);
        assert_names(&text_of(maker.parse()), parts);
    }
}

#[test]
fn tensors_that_lie() {
    const F32: u32 = 0;
    const Q4_0: u32 = 2;
    let one = |dims: &[u64], kind, offset| Maker::new().tensor("t", dims, kind, offset).data(64);
    let two = |dims: &[u64], offset| Maker::new().tensor("s", &[8], F32, 0).tensor("t", dims, F32, offset).data(256);
    let cases: [(Maker, &[&str]); 17] = [
        (one(&[1, 1, 1, 1, 1], F32, 0), &["at most 4 dimensions, got 5"]),
        (one(&[4], 99, 0), &["known type, got 99"]),
        (one(&[4], 4, 0), &["known type, got 4"]),
        (one(&[31], Q4_0, 0), &["[31] of Q4_0", "blocks of 32"]),
        (one(&[16, 2], Q4_0, 0), &["[2, 16] of Q4_0"]),
        (one(&[], Q4_0, 0), &["[] of Q4_0"]),
        (one(&[u64::MAX, 2], F32, 0), &["overflows"]),
        (one(&[1 << 62], F32, 0), &["overflows"]),
        (one(&[1 << 32, 1 << 32, 0], F32, 0), &["dimensions above 0"]),
        (one(&[4], F32, 8), &["multiple of 32, got 8"]),
        (one(&[17], F32, 0), &["68 bytes at offset 0 reach beyond the file", "64 bytes of data"]),
        (one(&[4], F32, 64), &["16 bytes at offset 64 reach beyond"]),
        (one(&[4], F32, u64::MAX - 31), &["reach beyond"]),
        (two(&[8], 0), &["overlap", "`s`"]),
        (two(&[8], 64), &["32 bytes before it belong to no tensor"]),
        (Maker::new().tensor("t", &[8], F32, 32).data(256), &["32 bytes before it belong to no tensor"]),
        (Maker::new().tensor("t", &[1], F32, 0).tensor("t", &[1], F32, 32).data(64), &["is there twice"]),
    ];
    for (maker, parts) in cases {
        assert_names(&text_of(maker.parse()), &["hostile.gguf", "tensor `t`"]);
        assert_names(&text_of(maker.parse()), parts);
    }
    assert_names(&text_of(Maker::new().tensor("", &[4], F32, 0).data(64).parse()), &["tensor 0", "empty"]);
}

#[test]
fn odd_files_that_are_right() {
    const F32: u32 = 0;
    // Declared in another order than they lie, a scalar, bytes after the last one.
    let header = Maker::new().tensor("b", &[3, 2], F32, 32).tensor("a", &[], F32, 0).data(200).parse().unwrap();
    let names: Vec<&str> = header.tensors.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!(header.tensor("a").unwrap().shape, [0usize; 0]);
    assert_eq!(header.tensor("b").unwrap().shape, [2, 3]);

    let mut wide = Maker::new().pair("general.alignment", 4, &[128, 0, 0, 0]).tensor("t", &[4], F32, 0);
    wide.data = 256;
    let header = wide.parse().unwrap();
    assert_eq!((header.alignment, header.tensor("t").unwrap().range.clone()), (128, 128..144));
}

#[test]
fn counts_that_take_more_memory_than_the_file_are_refused() {
    let refused = |maker: Maker, expected: &str| {
        let error = maker.parse().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let strings = |count: u64| [&8u32.to_le_bytes()[..], &count.to_le_bytes(), &vec![0; 8 * count as usize]].concat();
    // Arrays of empty strings, together too many.
    let maker = (0..5).fold(Maker::new(), |maker, i| maker.pair(&format!("k{i}"), 9, &strings(1 << 19)));
    refused(maker, "key `k4`: expected at most 2097152 strings and arrays in all");
    let maker = (0..4).fold(Maker::new(), |maker, i| maker.pair(&format!("k{i}"), 9, &strings(1 << 19)));
    assert_eq!(maker.parse().unwrap().metadata.len(), 4);
    let empty = [&4u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat();
    let arrays = [&9u32.to_le_bytes()[..], &(1u64 << 22).to_le_bytes(), &empty.repeat(1 << 22)].concat();
    refused(Maker::new().pair("k", 9, &arrays), "strings and arrays in all");
    let many = |pairs, tensors| Maker { pairs, tensors, header: vec![0; 8 << 20], ..Maker::new() };
    refused(many(1 << 17, 0), "at most 65536 metadata pairs, got 131072");
    refused(many(0, 1 << 18), "at most 131072 tensors, got 262144");
}
