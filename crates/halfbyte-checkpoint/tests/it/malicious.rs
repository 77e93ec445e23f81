//! Files that lie: each an error that names the file and, where there is one, the tensor.

use crate::support::{assert_names, listing, testdata, text_of};
use halfbyte_checkpoint::{Checkpoint, Error, Weights, inspect, linears};
use std::path::Path;
use std::time::Instant;

/// A file of this header and this many bytes of data.
fn file_of(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 1);
    bytes
}

fn open_bytes(bytes: &[u8]) -> halfbyte_checkpoint::Result<Checkpoint> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hostile.safetensors");
    std::fs::write(&path, bytes).unwrap();
    Checkpoint::open(path)
}

fn field(name: &str, dtype: &str, shape: &str, offsets: &str) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
}

#[test]
fn headers_that_do_not_fit_their_file() {
    let mut beyond = file_of(&format!("{{{}}}", field("a", "U8", "[2]", "[0,2]")), 2);
    beyond[..8].copy_from_slice(&1000u64.to_le_bytes());
    let mut absurd = beyond.clone();
    absurd[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let cases: &[(&[u8], &[&str])] = &[
        (b"", &["at least 8 bytes, got 0"]),
        (b"1234567", &["at least 8 bytes, got 7"]),
        (&beyond, &["1000", "beyond the file"]),
        (&absurd, &["18446744073709551615", "at most"]),
        (&file_of("", 0), &["begins with `{`"]),
        (&file_of("[]", 0), &["begins with `{`"]),
        (&file_of(" {}", 0), &["begins with `{`"]),
        (&file_of("{", 0), &["not a JSON object"]),
        (&file_of("{}{}", 0), &["not a JSON object"]),
        (&file_of("{\"a\":1}", 0), &["tensor `a`", "dtype"]),
        (&file_of("{\"a\":[]}", 0), &["tensor `a`"]),
        (&file_of("{\"a\":{}}", 0), &["tensor `a`", "missing field"]),
        (&file_of(r#"{"__metadata__":{"a":1}}"#, 0), &["`__metadata__`", "strings"]),
        (&file_of(r#"{"__metadata__":[]}"#, 0), &["`__metadata__`"]),
        (&file_of(&format!("{{{}", "\"a\":[".repeat(100_000)), 0), &["not a JSON object"]),
        (&[2, 0, 0, 0, 0, 0, 0, 0, b'{', 0xff], &["not a JSON object"]),
    ];
    for (bytes, parts) in cases {
        let text = text_of(open_bytes(bytes));
        assert_names(&text, &["hostile.safetensors"]);
        assert_names(&text, parts);
    }
    assert_eq!(open_bytes(&file_of("{}", 0)).unwrap().tensor_names().count(), 0);
}

#[test]
fn tensors_that_do_not_fit_their_file() {
    let two = |a: String, b: String| format!("{{{a},{b}}}");
    let one = |f: String| format!("{{{f}}}");
    let cases: Vec<(String, usize, &[&str])> = vec![
        (two(field("a", "U8", "[2]", "[0,2]"), field("a", "U8", "[2]", "[2,4]")), 4, &["`a` appears twice"]),
        (two(field("a", "U8", "[2]", "[0,2]"), field("\\u0061", "U8", "[2]", "[2,4]")), 4, &["`a` appears twice"]),
        (one(field("a", "U8", "[4]", "[0,4]")), 2, &["tensor `a`", "4 lies past the end", "2 bytes"]),
        (one(field("a", "U8", "[4]", "[0,18446744073709551615]")), 4, &["tensor `a`", "past the end"]),
        (one(field("a", "U8", "[4]", "[0,18446744073709551616]")), 4, &["tensor `a`"]),
        (one(field("a", "U8", "[4]", "[4,0]")), 4, &["tensor `a`", "in order"]),
        (one(field("a", "U8", "[4]", "[-4,0]")), 4, &["tensor `a`"]),
        (one(field("a", "U8", "[4]", "[0]")), 4, &["tensor `a`"]),
        (one(field("a", "U8", "[4]", "[0,4,4]")), 4, &["tensor `a`"]),
        (one(field("a", "U8", "[4]", "[0.0,4]")), 4, &["tensor `a`"]),
        (two(field("a", "U8", "[3]", "[0,3]"), field("b", "U8", "[3]", "[2,5]")), 5, &["tensor `b`", "overlap", "`a`"]),
        (two(field("a", "U8", "[4]", "[0,4]"), field("b", "U8", "[4]", "[0,4]")), 4, &["overlap"]),
        (
            two(field("a", "U8", "[2]", "[0,2]"), field("b", "U8", "[2]", "[3,5]")),
            5,
            &["tensor `b`", "1 bytes before it"],
        ),
        (one(field("a", "U8", "[2]", "[1,3]")), 3, &["tensor `a`", "1 bytes before it"]),
        (one(field("a", "U8", "[2]", "[0,2]")), 5, &["`a`", "3 more bytes"]),
        (one(field("a", "F32", "[2]", "[0,2]")), 2, &["tensor `a`", "expected 8 bytes", "got 2"]),
        (one(field("a", "F32", "[]", "[0,0]")), 0, &["tensor `a`", "expected 4 bytes", "got 0"]),
        (one(field("a", "F4", "[3]", "[0,2]")), 2, &["tensor `a`", "whole bytes"]),
        (one(field("a", "F32", "[4294967296,4294967296]", "[0,4]")), 4, &["tensor `a`", "overflows"]),
        (one(field("a", "F32", "[4611686018427387904]", "[0,0]")), 0, &["tensor `a`", "overflows"]),
        (one(field("a", "U8", "[4294967296,4294967296,0]", "[0,0]")), 0, &["tensor `a`", "overflows"]),
        (one(field("a", "U8", "[-1]", "[0,1]")), 1, &["tensor `a`"]),
        (one(field("a", "U8", "[1e3]", "[0,1000]")), 1000, &["tensor `a`"]),
        (one(field("a", "U8", "\"2\"", "[0,2]")), 2, &["tensor `a`"]),
        (one(field("a", "Q4", "[2]", "[0,2]")), 2, &["tensor `a`", "unknown dtype \"Q4\""]),
        (one(field("a", "f32", "[1]", "[0,4]")), 4, &["tensor `a`", "unknown dtype"]),
        (r#"{"a":{"dtype":7,"shape":[2],"data_offsets":[0,2]}}"#.into(), 2, &["tensor `a`", "string"]),
        (
            r#"{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#.into(),
            2,
            &["tensor `a`", "duplicate"],
        ),
    ];
    for (header, data, parts) in cases {
        let text = text_of(open_bytes(&file_of(&header, data)));
        assert_names(&text, &["hostile.safetensors"]);
        assert_names(&text, parts);
    }
}

#[test]
fn a_truncated_file_is_an_error_at_every_length() {
    let whole =
        file_of(&format!("{{{},{}}}", field("a", "U8", "[2]", "[0,2]"), field("b", "F16", "[2,2]", "[2,10]")), 10);
    assert!(open_bytes(&whole).is_ok());
    for length in 0..whole.len() {
        let error = open_bytes(&whole[..length]).unwrap_err();
        assert!(matches!(error, Error::Malformed { .. }), "{length}: {error}");
        assert_names(&error.to_string(), &["hostile.safetensors"]);
    }
    // No flipped bit of the header makes it panic, whatever it makes of it.
    for at in 0..whole.len() - 10 {
        for bit in 0..8 {
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << bit;
            if let Ok(checkpoint) = open_bytes(&flipped) {
                checkpoint.tensor_names().for_each(|name| assert!(checkpoint.bytes(name).unwrap().len() <= 10));
            }
        }
    }
}

/// A folder with two shards of one tensor each and this index.
fn open_index(dir: &Path, index: &str) -> halfbyte_checkpoint::Result<Checkpoint> {
    for name in ["a", "b"] {
        let header = format!("{{{}}}", field(name, "U8", "[2]", "[0,2]"));
        std::fs::write(dir.join(format!("{name}.safetensors")), file_of(&header, 2)).unwrap();
    }
    std::fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
    Checkpoint::open(dir)
}

#[test]
fn indices_that_lie() {
    let outside = tempfile::tempdir().unwrap();
    let header = format!("{{{}}}", field("a", "U8", "[2]", "[0,2]"));
    let secret = outside.path().join("secret.safetensors");
    std::fs::write(&secret, file_of(&header, 2)).unwrap();
    let absolute = format!(r#"{{"weight_map":{{"a":"{}"}}}}"#, secret.display());
    let cases: &[(&str, &[&str])] = &[
        ("[]", &["index.json", "not a JSON object"]),
        ("{", &["index.json", "not a JSON object"]),
        ("{}", &["index.json", "`weight_map`"]),
        (r#"{"weight_map":[]}"#, &["index.json", "`weight_map`: expected an object", "got a list"]),
        (r#"{"weight_map":{}}"#, &["index.json", "`weight_map`: expected an object", "got an empty one"]),
        (r#"{"weight_map":{"a":1}}"#, &["index.json", "tensor `a`", "name of a shard"]),
        (r#"{"weight_map":{"a":"a.safetensors","a":"b.safetensors"}}"#, &["index.json", "`a` appears twice"]),
        (
            r#"{"weight_map":{"a":"../a.safetensors"}}"#,
            &["index.json", "tensor `a`", "same folder", "../a.safetensors"],
        ),
        (r#"{"weight_map":{"a":"x/../../a.safetensors"}}"#, &["index.json", "tensor `a`", "same folder"]),
        (r#"{"weight_map":{"a":"./a.safetensors"}}"#, &["index.json", "tensor `a`", "same folder"]),
        (r#"{"weight_map":{"a":".."}}"#, &["index.json", "tensor `a`", "same folder"]),
        (r#"{"weight_map":{"a":""}}"#, &["index.json", "tensor `a`", "same folder"]),
        (r#"{"weight_map":{"a":"..\\a.safetensors"}}"#, &["index.json", "tensor `a`", "same folder"]),
        (&absolute, &["index.json", "tensor `a`", "same folder", "secret.safetensors"]),
        (r#"{"weight_map":{"a":"c.safetensors"}}"#, &["c.safetensors", "no such file"]),
        (
            r#"{"weight_map":{"a":"a.safetensors","c":"b.safetensors"}}"#,
            &["b.safetensors", "tensor `c`", "not in this shard"],
        ),
        (
            r#"{"weight_map":{"a":"b.safetensors","b":"a.safetensors"}}"#,
            &["tensor `a`", "the index says b.safetensors"],
        ),
    ];
    for (index, parts) in cases {
        let dir = tempfile::tempdir().unwrap();
        assert_names(&text_of(open_index(dir.path(), index)), parts);
    }
    let dir = tempfile::tempdir().unwrap();
    let good =
        open_index(dir.path(), r#"{"metadata":{},"weight_map":{"b":"b.safetensors","a":"a.safetensors"}}"#).unwrap();
    assert_eq!(good.tensor_names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(good.findings(), []);
}

#[test]
fn files_beside_an_index_that_it_does_not_name_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let one = open_index(dir.path(), r#"{"weight_map":{"b":"b.safetensors"}}"#).unwrap();
    assert_eq!(one.tensor_names().collect::<Vec<_>>(), ["b"]);
    let told: Vec<String> = one.findings().iter().map(ToString::to_string).collect();
    assert_eq!(
        told,
        ["a.safetensors: lies beside model.safetensors.index.json, which does not name it; it was not read"]
    );
}

#[test]
fn a_tensor_in_two_shards() {
    let dir = tempfile::tempdir().unwrap();
    let header = format!("{{{},{}}}", field("b", "U8", "[2]", "[0,2]"), field("c", "U8", "[2]", "[2,4]"));
    std::fs::write(dir.path().join("c.safetensors"), file_of(&header, 4)).unwrap();
    let index = r#"{"weight_map":{"a":"a.safetensors","b":"b.safetensors","c":"c.safetensors"}}"#;
    assert_names(&text_of(open_index(dir.path(), index)), &["tensor `b`", "b.safetensors", "c.safetensors", "too"]);
}

#[test]
fn folders_without_weights() {
    let dir = tempfile::tempdir().unwrap();
    assert_names(&text_of(Checkpoint::open(dir.path())), &["model.safetensors", "found none of them"]);
    let nowhere = dir.path().join("nowhere");
    let error = Checkpoint::open(&nowhere).unwrap_err();
    assert!(matches!(error, Error::Missing { .. }));
    assert_names(&error.to_string(), &["nowhere"]);
    // The only file of another name is taken; of two, neither.
    let header = format!("{{{}}}", field("a", "U8", "[2]", "[0,2]"));
    std::fs::write(dir.path().join("gptq_model-4bit.safetensors"), file_of(&header, 2)).unwrap();
    assert!(Checkpoint::open(dir.path()).unwrap().contains("a"));
    std::fs::write(dir.path().join("other.safetensors"), file_of(&header, 2)).unwrap();
    assert_names(&text_of(Checkpoint::open(dir.path())), &["index", "2 safetensors files"]);
    std::fs::create_dir(dir.path().join("folder.safetensors")).unwrap();
    std::fs::write(dir.path().join("model.safetensors.index.json"), r#"{"weight_map":{"a":"folder.safetensors"}}"#)
        .unwrap();
    assert_names(&text_of(Checkpoint::open(dir.path())), &["folder.safetensors"]);
}

/// What reading a model does with its files, up to the first error.
fn read_whole(folder: &Path) -> halfbyte_checkpoint::Result<()> {
    let weights = Weights::open(folder)?;
    inspect(&weights)?;
    linears(&weights)?;
    weights.modules().into_iter().try_for_each(|name| weights.load_linear(name).map(drop))
}

/// Each folder of `testdata/malicious`, and what its error names.
const CASES: &[(&str, &[&str])] = &[
    ("awq-no-groups", &["model.safetensors", "`m.scales`", "[0, 8]"]),
    ("awq-no-inputs", &["model.safetensors", "`m.qweight`", "[0, 1]"]),
    ("compressed-tensors-bits-0", &["config.json", "num_bits`", "expected 1 to 16, got 0"]),
    ("compressed-tensors-g-idx-negative", &["model.safetensors", "`m.weight_g_idx`", "from 0 to 1, got -1 at 8"]),
    ("compressed-tensors-g-idx-out-of-range", &["model.safetensors", "`m.weight_g_idx`", "from 0 to 1, got 2 at 8"]),
    ("compressed-tensors-group-0", &["config.json", "group_size`", "1 to 16777216, got 0"]),
    ("compressed-tensors-negative-shape", &["model.safetensors", "`m.weight_shape`", "neither negative"]),
    ("compressed-tensors-no-groups", &["model.safetensors", "`m.weight_scale`", "[2, 0]"]),
    ("compressed-tensors-shape-absurd", &["model.safetensors", "`m.weight_shape`", "4611686018427387904"]),
    ("config-bits-absurd", &["config.json", "`quantization_config.bits`", "got 1099511627776"]),
    ("config-bits-negative", &["config.json", "`quantization_config.bits`", "got -4"]),
    ("config-deep-json", &["config.json", "recursion limit"]),
    ("config-duplicate-names", &["config.json", "`bits` appears twice"]),
    ("config-group-0", &["config.json", "`quantization_config.group_size`", "got 0"]),
    ("config-group-absurd", &["config.json", "`quantization_config.group_size`", "got 4611686018427387904"]),
    ("config-group-beyond-i64", &["config.json", "`quantization_config.group_size`", "an integer"]),
    ("config-group-negative", &["config.json", "`quantization_config.group_size`", "got -8"]),
    ("gguf-no-inputs", &["model.gguf", "`blk.0.attn_q.weight`", "dimensions above 0, got [0, "]),
    ("gptq-g-idx-absurd", &["model.safetensors", "`m.g_idx`", "from 0 to 1, got 2147483647 at 8"]),
    ("gptq-g-idx-negative", &["model.safetensors", "`m.g_idx`", "from 0 to 1, got -1 at 8"]),
    ("gptq-g-idx-out-of-range", &["model.safetensors", "`m.g_idx`", "from 0 to 1, got 2 at 8"]),
    ("gptq-g-idx-short", &["model.safetensors", "`m.g_idx`", "[16]", "got [8]"]),
    ("gptq-no-groups", &["model.safetensors", "`m.scales`", "none of them 0", "got [0, 8]"]),
    ("gptq-no-inputs", &["model.safetensors", "qweight of [0, 8]"]),
    ("gptq-no-outputs", &["model.safetensors", "`m.scales`", "got [2, 0]"]),
    ("header-deep-json", &["model.safetensors", "not a JSON object"]),
    ("header-deep-metadata", &["model.safetensors", "not a JSON object"]),
    ("header-duplicate-fields", &["model.safetensors", "tensor `a`", "duplicate field `shape`"]),
    ("header-duplicate-names", &["model.safetensors", "`a` appears twice"]),
    ("header-length-2-63", &["model.safetensors", "at most 100000000", "9223372036854775808"]),
    ("header-length-beyond-file", &["model.safetensors", "4096", "beyond the file"]),
    ("header-negative-shape", &["model.safetensors", "tensor `a`", "`-2`"]),
    ("header-overlapping-ranges", &["model.safetensors", "tensor `b`", "overlap", "`a`"]),
    ("header-range-beyond-file", &["model.safetensors", "tensor `a`", "400 lies past the end"]),
    ("header-same-range", &["model.safetensors", "tensor `b`", "overlap", "`a`"]),
    ("header-shape-overflow", &["model.safetensors", "tensor `a`", "overflows"]),
    ("index-absolute-path", &["index.json", "tensor `a`", "same folder", "/etc/passwd"]),
    ("index-deep-json", &["index.json", "not a JSON object"]),
    ("index-duplicate-maps", &["index.json", "`weight_map` appears twice"]),
    ("index-duplicate-names", &["index.json", "`a` appears twice"]),
    ("index-names-itself", &["index.json", "at most 100000000"]),
    ("index-path-traversal", &["index.json", "tensor `a`", "same folder", "../header-length-2-63"]),
    ("quant-config-deep-json", &["quant_config.json", "recursion limit"]),
    ("quant-config-duplicate-names", &["quant_config.json", "`w_bit` appears twice"]),
    ("quant-config-group-0", &["quant_config.json", "`group_size`", "got 0"]),
    ("quantize-config-bits-absurd", &["quantize_config.json", "`bits`", "got 1099511627776"]),
    ("quantize-config-bits-negative", &["quantize_config.json", "`bits`", "got -4"]),
    ("quantize-config-deep-json", &["quantize_config.json", "recursion limit"]),
    ("quantize-config-duplicate-names", &["quantize_config.json", "`bits` appears twice"]),
    ("quantize-config-group-0", &["quantize_config.json", "`group_size`", "got 0"]),
    ("quantize-config-group-absurd", &["quantize_config.json", "`group_size`", "got 4611686018427387904"]),
    ("quantize-config-group-beyond-i64", &["quantize_config.json", "`group_size`", "an integer"]),
    ("quantize-config-group-negative", &["quantize_config.json", "`group_size`", "got -8"]),
];

#[test]
fn every_malicious_folder_is_an_error_that_says_where_and_what() {
    let root = testdata("malicious");
    assert_eq!(listing(&root), CASES.iter().map(|(case, _)| *case).collect::<Vec<_>>());
    for (case, parts) in CASES {
        let begun = Instant::now();
        let text = text_of(read_whole(&root.join(case)));
        assert_names(&text, &[case]);
        assert_names(&text, parts);
        assert!(text.len() < 1000 && begun.elapsed().as_secs() < 5, "{case}: {} bytes", text.len());
    }
}
