//! Files that ask for more than tensors, or that lie: each an error in one sentence, soon, and nothing is run.

use super::build::*;
use super::golden;
use crate::support::{assert_names, text_of};
use halfbyte_checkpoint::{Checkpoint, Error};
use std::time::{Duration, Instant};

fn open(bytes: &[u8]) -> halfbyte_checkpoint::Result<Checkpoint> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hostile.pt");
    std::fs::write(&path, bytes).unwrap();
    let begun = Instant::now();
    let checkpoint = Checkpoint::open(path);
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    checkpoint
}

#[track_caller]
fn refused(bytes: &[u8], parts: &[&str]) {
    let text = text_of(open(bytes));
    assert_names(&text, &["hostile.pt: "]);
    assert_names(&text, parts);
    assert!(text.len() < 700 && !text.contains(['\n', '\x1b']), "{text}");
}

/// Refused in an archive and in a legacy file.
#[track_caller]
fn refused_root(root: &[u8], parts: &[&str]) {
    refused(&archive(root), parts);
    refused(&legacy(root, &[], &[]), parts);
}

#[test]
fn what_the_cases_are_variations_of_is_read() {
    let checkpoint = open(&archive(&dict(&[("a", six())]))).unwrap();
    assert_eq!(checkpoint.floats("a").unwrap().to_f32(), [0., 1., 2., 3., 4., 5.]);
    assert_eq!(checkpoint.findings(), []);
    let six_of_old = [
        tuple(&[text("storage"), name("torch", "FloatStorage"), text("7"), text("cpu"), int(1), b"N".to_vec()]),
        b"Q".to_vec(),
    ];
    let one = tensor(six_of_old.concat(), 0, &[1], &[1]);
    let checkpoint = open(&legacy(&dict(&[("a", one)]), &["7"], &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 128, 63])).unwrap();
    assert_eq!(checkpoint.floats("a").unwrap().to_f32(), [1.0]);
}

#[test]
fn nothing_is_called() {
    let argument = [text("touch /hostile")];
    for (module, function) in
        [("posix", "system"), ("os", "system"), ("builtins", "eval"), ("torch.hub", "load"), ("torch", "load")]
    {
        refused_root(
            &call(name(module, function), &argument),
            &[&format!("asks to call `{module}.{function}`"), "nothing was run"],
        );
        let by_stack = [text(module), text(function), b"\x93".to_vec(), tuple(&argument), b"R".to_vec()].concat();
        refused_root(&by_stack, &[&format!("`{module}.{function}`")]);
        let instance = [b"(".to_vec(), argument.concat(), format!("i{module}\n{function}\n").into_bytes()].concat();
        refused_root(&instance, &[&format!("`{module}.{function}`")]);
        // Among tensors, after them, and as the class of a storage.
        refused_root(&dict(&[("a", six()), ("b", call(name(module, function), &argument))]), &[function]);
        let of_class =
            [tuple(&[text("storage"), name(module, function), text("0"), text("cpu"), int(6)]), b"Q".to_vec()];
        refused_root(&of_class.concat(), &[function]);
    }
    // Such a file is not damaged: to fetch it again would not help.
    let asks = open(&archive(&name("posix", "system"))).unwrap_err();
    assert!(matches!(asks, Error::Unsupported { .. }), "{asks:?}");
    assert!(matches!(open(&archive(b"N")).unwrap_err(), Error::Malformed { .. }));
    // Also where the file ought to begin otherwise.
    refused(&pickle(&call(name("posix", "system"), &argument)), &["the magic number: asks to call `posix.system`"]);
    refused_root(&name("a\u{1b}[2J", "b\u{202e}c"), &["asks to call `a\\u{1b}[2J.b\\u{202e}c`"]);
    refused_root(&name(&"a".repeat(100_000), "b"), &["aaa…"]);
    refused_root(&call(name("torch", "FloatStorage"), &[int(9)]), &["asks to call `torch.FloatStorage`"]);
    refused_root(&call(int(5), &[]), &["asks to call an integer"]);
    refused_root(&call(text("os.system"), &[]), &["asks to call a text"]);
    refused_root(&[six(), b"}b".to_vec()].concat(), &["asks to set the state of a tensor"]);
    // NEWOBJ, EXT1, a set, a text of a persistent id.
    for opcode in ["\u{81}", "\u{82}", "\u{8f}", "P"] {
        let body = [b"]]".to_vec(), opcode.chars().map(|c| c as u8).collect()].concat();
        refused_root(&body, &[&format!("opcode 0x{:02x}", opcode.chars().next().unwrap() as u32)]);
    }
}

#[test]
fn depth_and_repetition_cost_nothing() {
    // A list of ten times the list before, a hundred times over.
    let mut laughs = b"]q\x00".to_vec();
    let mut dicts = b"}q\x00".to_vec();
    for level in 1..100u8 {
        laughs.extend([&b"]("[..], &[b'h', level - 1].repeat(10), b"eq", &[level]].concat());
        let (a, b) = (text("a"), text("b"));
        dicts.extend([&b"}("[..], &a, &[b'h', level - 1], &b, &[b'h', level - 1], b"uq", &[level]].concat());
    }
    refused_root(&laughs, &["expected a dict of tensors, got a list"]);
    refused_root(&dicts, &["expected a dict of tensors, got one with `a` (a dict), `b` (a dict)"]);
    for (wrap, kind) in [(&b"\x85"[..], "tuple"), (&b"q\x000]h\x00a"[..], "list")] {
        let deep = [b")".to_vec(), wrap.repeat(100_000)].concat();
        refused_root(&deep, &[&format!("expected a dict of tensors, got a {kind}")]);
        let checkpoint = open(&archive(&dict(&[("a", six()), ("b", deep)]))).unwrap();
        assert_names(&checkpoint.findings()[0].to_string(), &["hostile.pt", &format!("`b` (a {kind})")]);
    }
    // Findings name a few of many; one tensor has no end of names.
    let many: Vec<u8> = (0..70_000).flat_map(|i| [text(&format!("{i}")), b"h\x01".to_vec()].concat()).collect();
    let under = |value: Vec<u8>| [b"}".to_vec(), value, b"q\x010(".to_vec(), many.clone(), b"u".to_vec()].concat();
    refused(&archive(&under(six())), &["more than 65536 tensors"]);
    refused_root(&under(b"}".to_vec()), &["`5` (a dict) and 69994 more"]);
    // A dict within itself.
    refused_root(&[b"}q\x00".to_vec(), text("a"), b"h\x00s".to_vec()].concat(), &["`a` (a dict)"]);
    // Values without end, names without end on the stack, marks without end.
    refused_root(&[b"]0".repeat(1_000_000), b"N".to_vec()].concat(), &["its values take more than 48 MB"]);
    refused_root(&b"N".repeat(1_100_000), &["its stack has more than 1048576 entries"]);
    refused_root(&b"(".repeat(1_100_000), &["its stack has more than 1048576 entries"]);
    refused_root(&[b"](".to_vec(), b"N".repeat(1_000_000), b"e2".repeat(3)].concat(), &["at byte"]);
    let shape = [b"(".to_vec(), b"K\x01".repeat(17), b"t".to_vec()].concat();
    let v2 = [storage("FloatStorage", "0", 6), int(0), shape.clone(), shape, b"\x89".to_vec(), b"N".to_vec()];
    refused(&archive(&dict(&[("a", call(name("torch._utils", "_rebuild_tensor_v2"), &v2))])), &["`a`", "at most 16"]);
}

#[test]
fn pickles_that_make_no_sense() {
    for (body, part) in [
        (&b"X\xff\xff\xff\xffabc"[..], "expected 4294967295 more bytes"),
        (b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc", "expected 18446744073709551615 more bytes"),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc", "more bytes"),
        (b"B\xff\xff\xff\xff", "more bytes"),
        (b"\x8b\xff\xff\xff\xff", "more bytes"),
        (b"\x8a\xff", "more bytes"),
        (b"\x95\xff\xff\xff\xff\xff\xff\xff\xff", "reaches beyond the file"),
        (b"X\x01\0\0\0\xff", "UTF-8"),
        (b"cposix", "ends with its line"),
        (b"\x80\x01", "protocol"),
        (b"\x80\x06", "protocol"),
        (b"", "takes more from its stack"),
        (b"0", "takes more from its stack"),
        (b"N(a", "takes more from its stack"),
        (b"]e", "a mark that is not there"),
        (b"](Na", "takes more from its stack"),
        (b"h\x05", "entry 5 of its memo, which is not there"),
        (b"j\xff\xff\xff\xff", "memo"),
        (b"Nr\xff\xff\xff\xff", "memo has an entry 4294967295"),
        (b"}Na", "expected a list to append to, got a dict"),
        (b"]NNs", "expected a dict to add to, got a list"),
        (b"}(Nu", "a key of a dict has no value"),
        (b"NQ", "persistent id"),
        (b")Q", "persistent id"),
        (b"(NNNNNtQ", "persistent id"),
        (b"(NNNNNNNtQ", "persistent id"),
        (b"NN\x93", "no texts"),
    ] {
        refused(&archive(body), &[part]);
        refused_root(body, &["pickle"]);
    }
    refused(&zip(&[entry("m/data.pkl", b"\x80\x02}.more")]), &["4 bytes follow the pickle in `m/data.pkl`"]);
    refused(&zip(&[entry("m/data.pkl", b"")]), &["expected 1 more bytes, got 0"]);
    refused_root(b"}", &["expected a dict of tensors, got one with no entries"]);
    refused_root(b"N", &["expected a dict of tensors, got None"]);
    refused(&archive(&six()), &["expected a dict of tensors, got a tensor"]);
    refused(&archive(&dict(&[("a", six()), ("a", six())])), &["tensor `a` appears twice"]);
    let nested = dict(&[("a", six()), ("b", dict(&[("c", six())]))]);
    refused(&archive(&nested), &["expected one dict of tensors, found 2: all of it, `b`"]);
    let class = name("torch._utils", "_rebuild_tensor_v2");
    refused_root(&call(class.clone(), &[]), &["calls `torch._utils._rebuild_tensor_v2` with 0 arguments"]);
    refused_root(&[class, b"NR".to_vec()].concat(), &["with None, not a tuple"]);
    refused_root(&call(name("torch", "Size"), &[int(1)]), &["calls `torch.Size`"]);
    refused_root(&call(name("collections", "OrderedDict"), &[ints(&[1])]), &["OrderedDict` with other than pairs"]);
    refused_root(&call(name("torch._utils", "_rebuild_parameter"), &[int(1), int(1), int(1)]), &["_rebuild_parameter"]);
}

#[test]
fn tensors_that_do_not_fit_their_storage() {
    let of = |offset, shape: &[i128], strides: &[i128]| tensor(storage("FloatStorage", "0", 6), offset, shape, strides);
    let beyond = "beyond its storage of 6 elements";
    for (tensor, part) in [
        (of(1, &[2, 3], &[3, 1]), beyond),
        (of(7, &[0], &[1]), beyond),
        (of(0, &[2, 3], &[4, 1]), beyond),
        (of(i128::from(u64::MAX), &[1], &[1]), beyond),
        (of(0, &[2, 2], &[i128::from(u64::MAX), 1]), beyond),
        (of(0, &[1 << 40, 1 << 40], &[0, 0]), "overflows"),
        (of(0, &[1 << 40, 1 << 40, 0], &[0, 0, 0]), "overflows"),
        (of(-1, &[2, 3], &[3, 1]), "offset"),
        (of(1 << 70, &[2, 3], &[3, 1]), "offset"),
        (of(0, &[-2, 3], &[3, 1]), "expected shape that are not negative"),
        (of(0, &[2, 3], &[-3, 1]), "expected strides that are not negative"),
        (of(0, &[2, 3], &[1]), "as many strides"),
        (of(0, &[1000, 3], &[0, 1]), "share memory"),
        (of(0, &[1 << 40], &[0]), "share memory"),
        (of(0, &[2, 3], &[1, 1]), "share memory"),
        (tensor(storage("FloatStorage", "0", 7), 0, &[1], &[1]), "should have 7 elements, but the file has 24 bytes"),
        (tensor(storage("FloatStorage", "0", 1 << 60), 0, &[1], &[1]), "should have 1152921504606846976 elements"),
        (tensor(storage("FloatStorage", "0", 1 << 63), 0, &[1], &[1]), "should have 9223372036854775808 elements"),
        (tensor(storage("LongStorage", "0", 6), 0, &[6], &[1]), "should have 6 elements"),
        (tensor(storage("FloatStorage", "1", 6), 0, &[6], &[1]), "storage `1` is not in the file"),
        (tensor(storage("FloatStorage", "../../m/data/0", 6), 0, &[6], &[1]), "is not in the file"),
        (tensor(storage("UntypedStorage", "0", 24), 0, &[6], &[1]), "no type of elements"),
    ] {
        refused(&archive(&dict(&[("a", tensor)])), &["tensor `a`: ", part]);
    }
    for elements in [-1, 1 << 64] {
        let tensor = tensor(storage("FloatStorage", "0", elements), 0, &[6], &[1]);
        refused(&archive(&dict(&[("a", tensor)])), &["storage `0` has a number of elements that is none"]);
    }
    // Strides of dimensions of 1, and of nothing, say nothing.
    for tensor in [of(0, &[1, 6], &[1 << 50, 1]), of(6, &[0, 5], &[1 << 50, 7]), of(5, &[], &[])] {
        assert_eq!(open(&archive(&dict(&[("a", tensor)]))).unwrap().tensors().count(), 1);
    }
}

#[test]
fn archives_that_contradict_themselves() {
    let good = entries(&dict(&[("a", six())]));
    let with = |change: &dyn Fn(&mut Vec<Entry>)| {
        let mut entries = good.clone();
        change(&mut entries);
        zip(&entries)
    };
    refused(&with(&|e| e.push(e[1].clone())), &["there are two entries `m/data/0`"]);
    refused(&with(&|e| e[1].offset = Some(0)), &["entry `m/data/0`", "two names"]);
    refused(&with(&|e| e[1].offset = Some(1 << 30)), &["entry `m/data/0`", "1073741824 lies outside"]);
    refused(&with(&|e| e[1].offset = Some(u32::MAX)), &["entry `m/data/0` has no zip64 field"]);
    refused(&with(&|e| e[1].offset = Some(5)), &["no header at byte 5"]);
    refused(&with(&|e| e[1].own_name = Some("m/data/1".into())), &["entry `m/data/0`", "two names"]);
    refused(&with(&|e| e[1].own_size = Some(8)), &["entry `m/data/0`", "two sizes"]);
    refused(&with(&|e| e[1].size = Some(8)), &["entry `m/data/0`", "two sizes"]);
    refused(&with(&|e| e[1].own_method = Some(8)), &["entry `m/data/0`", "two methods"]);
    refused(&with(&|e| e[1].method = 8), &["entry `m/data/0` is compressed (deflate)"]);
    refused(&with(&|e| e[0].method = 12), &["entry `m/data.pkl` is compressed;"]);
    refused(&with(&|e| e[0].flags = 1), &["entry `m/data.pkl` is encrypted"]);
    refused(&with(&|e| (e[1].size, e[1].own_size) = (Some(400), Some(400))), &["400 bytes reach beyond"]);
    refused(&with(&|e| (e[1].size, e[1].own_size) = (Some(40), Some(40))), &["`m/data/0` and `m/version` share bytes"]);
    refused(&with(&|e| e.push(entry("n/data.pkl", b"\x80\x02}."))), &["several data.pkl"]);
    refused(&with(&|e| e.push(entry("m/constants.pkl", b"\x80\x02)."))), &["a program of TorchScript"]);
    refused(&with(&|e| e.push(entry("m/byteorder", b"big"))), &["big-endian"]);
    refused(&with(&|e| e[0].name = "m/model.pkl".into()), &["without a data.pkl"]);
    refused(&with(&|e| e[0].name = "data.pkl".into()), &["without a data.pkl"]);
    refused(&with(&|e| e[0].name = "../x/data.pkl".into()), &["without a data.pkl"]);
    let whole = zip(&good);
    refused(&[&whole[..], b"more"].concat(), &["directory is missing at the end"]);
    refused(&whole[..whole.len() - 1], &["directory is missing at the end"]);
    refused(&[&whole[..100], &whole[96..]].concat(), &["expected its zip directory to end at byte"]);
    let count = whole.len() - 14;
    let mut fewer = whole.clone();
    fewer[count..count + 4].copy_from_slice(&[2, 0, 2, 0]);
    refused(&fewer, &["announces 2 entries and has 3"]);
    fewer[count] = 1;
    refused(&fewer, &["one of several files"]);
    // torch writes the directory's place twice.
    let mut torch = std::fs::read(golden("module.pt")).unwrap();
    let end = torch.len() - 22;
    torch[end + 10] ^= 1;
    torch[end + 8] ^= 1;
    refused(&torch, &["contradict each other"]);
}

#[test]
fn legacy_files_that_contradict_themselves() {
    let view = |key: &str, elements: i128, view: Vec<u8>| {
        let id = [text("storage"), name("torch", "FloatStorage"), text(key), text("cpu"), int(elements), view];
        tensor([tuple(&id), b"Q".to_vec()].concat(), 0, &[1], &[1])
    };
    let one = |key: &str, elements| view(key, elements, b"N".to_vec());
    let root = dict(&[("a", one("7", 1))]);
    let data = [1u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 128, 63];
    assert!(open(&legacy(&root, &["7"], &data)).is_ok());
    refused(&pickle(&int(0x1950)), &["magic number 0x1950a86a20f9469cfc6c first, got 0x1950"]);
    refused(&pickle(b"}"), &["magic number", "got a dict", "another program"]);
    let mut wrong = legacy(&root, &["7"], &data);
    wrong[4] ^= 1;
    refused(&wrong, &["magic number", "got 0x1950a86a20f9469cfc6d"]);
    refused(&[pickle(&int(0x1950_a86a_20f9_469c_fc6c)), pickle(&int(1002))].concat(), &["expected version 1001"]);
    let big = [pickle(&int(0x1950_a86a_20f9_469c_fc6c)), pickle(&int(1001)), pickle(b"}")].concat();
    refused(&big, &["little-endian"]);
    refused(&legacy(&root, &[], &[]), &["tensor `a`: its storage `7` is not in the file"]);
    refused(&legacy(&root, &["8"], &data), &["storage `8` belongs to no tensor"]);
    refused(&legacy(&root, &["7", "7"], &[data, data].concat()), &["storage `7`: there are two"]);
    refused(&legacy(&root, &["7"], &data[..7]), &["storage `7`: it lies beyond the end"]);
    refused(&legacy(&root, &["7"], &data[..11]), &["storage `7`: its 1 elements reach beyond the file"]);
    refused(&legacy(&root, &["7"], &[&data[..], b"more"].concat()), &["got 4 bytes more"]);
    refused(&legacy(&dict(&[("a", one("7", 2))]), &["7"], &data), &["says 2 elements, the storage says 1"]);
    let huge = [&(1u64 << 60).to_le_bytes()[..], &data[8..]].concat();
    refused(&legacy(&dict(&[("a", one("7", 1 << 60))]), &["7"], &huge), &["1152921504606846976 elements reach beyond"]);
    refused(&legacy(&dict(&[("a", one("7", 1)), ("b", one("7", 2))]), &["7"], &data), &["two types or sizes"]);
    let viewed = view("7", 1, tuple(&[text("7"), int(0), int(1)]));
    refused(&legacy(&dict(&[("a", viewed)]), &["7"], &data), &["a view of another"]);
}

#[test]
fn names_reach_no_terminal_raw() {
    let root = dict(&[("a", six()), ("b\n\u{1b}[31m", int(1))]);
    let checkpoint = open(&archive(&root)).unwrap();
    assert_names(&checkpoint.findings()[0].to_string(), &["`b\\n\\u{1b}[31m` (an integer)"]);
    refused(
        &archive(&dict(&[("\u{1b}[31m\n", tensor(storage("FloatStorage", "0", 7), 0, &[1], &[1]))])),
        &["`\\u{1b}[31m\\n`"],
    );
    refused(&zip(&[entry("a\n\u{1b}", b""), entry("a\n\u{1b}", b"")]), &["two entries `a\\n\\u{1b}`"]);
}
