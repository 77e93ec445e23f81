//! Pickles and archives as PyTorch writes them, and as it does not.

/// A pickle of protocol 2 of what this builds.
pub fn pickle(body: &[u8]) -> Vec<u8> {
    [b"\x80\x02", body, b"."].concat()
}

pub fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

/// An integer, by LONG1.
pub fn int(int: i128) -> Vec<u8> {
    [b"\x8a\x10", &int.to_le_bytes()[..]].concat()
}

pub fn name(module: &str, name: &str) -> Vec<u8> {
    format!("c{module}\n{name}\n").into_bytes()
}

pub fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
    [b"(", &items.concat()[..], b"t"].concat()
}

pub fn ints(ints: &[i128]) -> Vec<u8> {
    tuple(&ints.iter().map(|&i| int(i)).collect::<Vec<_>>())
}

pub fn call(callee: Vec<u8>, arguments: &[Vec<u8>]) -> Vec<u8> {
    [callee, tuple(arguments), b"R".to_vec()].concat()
}

pub fn dict(pairs: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let items: Vec<u8> = pairs.iter().flat_map(|(key, value)| [text(key), value.clone()].concat()).collect();
    [b"}(", &items[..], b"u"].concat()
}

/// A storage of an archive's.
pub fn storage(class: &str, key: &str, elements: i128) -> Vec<u8> {
    let id = [text("storage"), name("torch", class), text(key), text("cpu"), int(elements)];
    [tuple(&id), b"Q".to_vec()].concat()
}

/// A tensor of these arguments.
pub fn tensor(storage: Vec<u8>, offset: i128, shape: &[i128], strides: &[i128]) -> Vec<u8> {
    let hooks = call(name("collections", "OrderedDict"), &[]);
    let arguments = [storage, int(offset), ints(shape), ints(strides), b"\x89".to_vec(), hooks];
    call(name("torch._utils", "_rebuild_tensor_v2"), &arguments)
}

/// A tensor of six floats, 2 × 3.
pub fn six() -> Vec<u8> {
    tensor(storage("FloatStorage", "0", 6), 0, &[2, 3], &[3, 1])
}

/// An entry of an archive; what its two headers say can be made to differ.
#[derive(Clone)]
pub struct Entry {
    pub name: String,
    pub data: Vec<u8>,
    pub method: u16,
    pub flags: u16,
    /// What its own header says instead.
    pub own_name: Option<String>,
    pub own_method: Option<u16>,
    pub own_size: Option<u32>,
    /// What the directory says instead.
    pub size: Option<u32>,
    pub offset: Option<u32>,
}

pub fn entry(name: &str, data: &[u8]) -> Entry {
    Entry {
        name: name.to_owned(),
        data: data.to_vec(),
        method: 0,
        flags: 0,
        own_name: None,
        own_method: None,
        own_size: None,
        size: None,
        offset: None,
    }
}

/// A zip archive.
pub fn zip(entries: &[Entry]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for e in entries {
        let offset = e.offset.unwrap_or(file.len() as u32);
        let own_name = e.own_name.as_ref().unwrap_or(&e.name);
        let own_size = e.own_size.unwrap_or(e.data.len() as u32);
        let size = e.size.unwrap_or(e.data.len() as u32);
        file.extend(b"PK\x03\x04\0\0");
        file.extend([e.flags, e.own_method.unwrap_or(e.method), 0, 0].map(u16::to_le_bytes).concat());
        file.extend([0, own_size, own_size].map(u32::to_le_bytes).concat());
        file.extend([own_name.len() as u16, 0].map(u16::to_le_bytes).concat());
        file.extend(own_name.as_bytes());
        file.extend(&e.data);
        directory.extend(b"PK\x01\x02\0\0\0\0");
        directory.extend([e.flags, e.method, 0, 0].map(u16::to_le_bytes).concat());
        directory.extend([0, size, size].map(u32::to_le_bytes).concat());
        directory.extend([e.name.len() as u16, 0, 0, 0, 0, 0, 0].map(u16::to_le_bytes).concat());
        directory.extend(offset.to_le_bytes());
        directory.extend(e.name.as_bytes());
    }
    let (start, count) = (file.len() as u32, entries.len() as u16);
    file.extend(&directory);
    file.extend(b"PK\x05\x06\0\0\0\0");
    file.extend([count, count].map(u16::to_le_bytes).concat());
    file.extend([directory.len() as u32, start].map(u32::to_le_bytes).concat());
    file.extend([0, 0]);
    file
}

/// The entries of an archive with this pickle and a storage of 24 bytes.
pub fn entries(root: &[u8]) -> Vec<Entry> {
    let data: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    vec![entry("m/data.pkl", &pickle(root)), entry("m/data/0", &data), entry("m/version", b"3\n")]
}

/// An archive with this pickle.
pub fn archive(root: &[u8]) -> Vec<u8> {
    zip(&entries(root))
}

/// A legacy file of this state dict, with these keys and these storages behind them.
pub fn legacy(root: &[u8], keys: &[&str], data: &[u8]) -> Vec<u8> {
    let system = dict(&[("protocol_version", int(1001)), ("little_endian", b"\x88".to_vec())]);
    let keys: Vec<u8> = keys.iter().flat_map(|key| text(key)).collect();
    let keys = [b"](", &keys[..], b"e"].concat();
    let pickles = [int(0x1950_a86a_20f9_469c_fc6c), int(1001), system, root.to_vec(), keys];
    [pickles.map(|body| pickle(&body)).concat(), data.to_vec()].concat()
}
