// A Google Cloud Storage for tests: fake-gcs-server, and before it the part of the XML interface that clients in Rust
// (object_store, and so obstore and delta-rs) write and list with. fake-gcs-server knows that interface for plain reads
// only: it refuses to write an object, lists from the beginning whatever it is asked, and sends what has not changed.
//
// Objects, generations and their comparison are fake-gcs-server's: what is written here asks it in its JSON interface.
package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fsouza/fake-gcs-server/fakestorage"
)

const pageOfAList = 1000

type front struct {
	server  *fakestorage.Server
	address string
	mutex   sync.Mutex
	uploads map[string]map[int][]byte // parts by number, of each upload in parts that is not complete
	begun   int
}

func main() {
	address := os.Args[1]
	server, err := fakestorage.NewServerWithOptions(fakestorage.Options{
		NoListener:  true,
		Scheme:      "http",
		PublicHost:  address,
		ExternalURL: "http://" + address,
	})
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(http.ListenAndServe(address, &front{server: server, address: address, uploads: map[string]map[int][]byte{}}))
}

func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	bucket, object, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	query := r.URL.Query()
	// A proxy has another port, and fake-gcs-server takes a host that it does not know for a bucket's name.
	r.Host = f.address
	switch {
	case slices.Contains([]string{"", "storage", "upload", "download", "batch", "_internal"}, bucket):
		f.server.HTTPHandler().ServeHTTP(w, r)
	case object == "" && r.Method == http.MethodGet:
		f.list(w, bucket, query)
	case query.Has("uploads") || query.Has("uploadId"):
		f.inParts(w, r, bucket, object)
	case r.Method == http.MethodPut && r.Header.Get("x-goog-copy-source") != "":
		f.copy(w, r, bucket, object)
	case r.Method == http.MethodPut:
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // the client went away: nothing is stored
		}
		answer, stored := f.insert(r, bucket, object, body)
		name(w.Header(), stored)
		w.WriteHeader(answer)
	case r.Method == http.MethodDelete:
		answer := f.ask(r)
		if answer.Code == http.StatusOK {
			answer.Code = http.StatusNoContent
		}
		w.WriteHeader(answer.Code)
	default:
		f.get(w, r)
	}
}

type stored struct {
	ETag       string `json:"etag"`
	Generation string `json:"generation"`
}

func name(headers http.Header, object stored) {
	if object.ETag != "" {
		headers.Set("ETag", strconv.Quote(object.ETag))
		headers.Set("x-goog-generation", object.Generation)
	}
}

func (f *front) ask(r *http.Request) *httptest.ResponseRecorder {
	answer := httptest.NewRecorder()
	f.server.HTTPHandler().ServeHTTP(answer, r)
	return answer
}

// insert stores an object, if the object there has the generation that the request names; 0 is no object.
func (f *front) insert(r *http.Request, bucket, object string, body []byte) (int, stored) {
	query := url.Values{"uploadType": {"media"}, "name": {object}}
	if generation := r.Header.Get("x-goog-if-generation-match"); generation != "" {
		query.Set("ifGenerationMatch", generation)
	}
	target := fmt.Sprintf("/upload/storage/v1/b/%s/o?%s", url.PathEscape(bucket), query.Encode())
	request := httptest.NewRequest(http.MethodPost, target, bytes.NewReader(body))
	request.Header.Set("Content-Type", r.Header.Get("Content-Type"))
	answer := f.ask(request)
	var answered stored
	if answer.Code == http.StatusOK {
		if err := json.Unmarshal(answer.Body.Bytes(), &answered); err != nil {
			log.Fatal(err)
		}
	}
	return answer.Code, answered
}

// get answers as fake-gcs-server does, but heeds the conditions on the entity tag.
func (f *front) get(w http.ResponseWriter, r *http.Request) {
	answer := f.ask(r)
	tag := answer.Header().Get("ETag")
	maps.Copy(w.Header(), answer.Header())
	if answer.Code < 300 && r.Header.Get("If-None-Match") == tag {
		w.Header().Del("Content-Length")
		w.WriteHeader(http.StatusNotModified)
		return
	}
	if wanted := r.Header.Get("If-Match"); answer.Code < 300 && wanted != "" && wanted != tag {
		w.Header().Del("Content-Length")
		w.WriteHeader(http.StatusPreconditionFailed)
		return
	}
	w.WriteHeader(answer.Code)
	w.Write(answer.Body.Bytes())
}

func (f *front) copy(w http.ResponseWriter, r *http.Request, bucket, object string) {
	source, err := url.PathUnescape(r.Header.Get("x-goog-copy-source"))
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	from, key, _ := strings.Cut(strings.TrimPrefix(source, "/"), "/")
	content, err := f.server.GetObject(from, key)
	if err != nil {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	answer, stored := f.insert(r, bucket, object, content.Content)
	name(w.Header(), stored)
	answerXML(w, answer, struct {
		XMLName xml.Name `xml:"CopyObjectResult"`
		ETag    string
	}{ETag: stored.ETag})
}

func (f *front) inParts(w http.ResponseWriter, r *http.Request, bucket, object string) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	f.mutex.Lock()
	defer f.mutex.Unlock()
	query := r.URL.Query()
	id := query.Get("uploadId")
	parts, known := f.uploads[id]
	switch {
	case query.Has("uploads"):
		f.begun++
		id = strconv.Itoa(f.begun)
		f.uploads[id] = map[int][]byte{}
		answerXML(w, http.StatusOK, struct {
			XMLName  xml.Name `xml:"InitiateMultipartUploadResult"`
			UploadId string
		}{UploadId: id})
	case !known:
		w.WriteHeader(http.StatusNotFound)
	case r.Method == http.MethodDelete:
		delete(f.uploads, id)
		w.WriteHeader(http.StatusNoContent)
	case r.Method == http.MethodPut:
		number, err := strconv.Atoi(query.Get("partNumber"))
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		parts[number] = body
		w.Header().Set("ETag", strconv.Quote(query.Get("partNumber")))
	default:
		var whole []byte
		for _, number := range slices.Sorted(maps.Keys(parts)) {
			whole = append(whole, parts[number]...)
		}
		answer, stored := f.insert(r, bucket, object, whole)
		delete(f.uploads, id)
		name(w.Header(), stored)
		answerXML(w, answer, struct {
			XMLName xml.Name `xml:"CompleteMultipartUploadResult"`
			ETag    string
		}{ETag: strconv.Quote(stored.ETag)})
	}
}

type listed struct {
	Key          string
	Generation   int64
	LastModified string
	ETag         string
	Size         int64
}

type prefix struct{ Prefix string }

func (f *front) list(w http.ResponseWriter, bucket string, query url.Values) {
	after := max(query.Get("start-after"), query.Get("continuation-token"))
	objects, prefixes, err := f.server.ListObjectsWithOptions(bucket, fakestorage.ListOptions{
		Prefix:      query.Get("prefix"),
		Delimiter:   query.Get("delimiter"),
		StartOffset: after, // which is listed, too
	})
	if err != nil {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	limit, err := strconv.Atoi(query.Get("max-keys"))
	if err != nil {
		limit = pageOfAList
	}
	result := struct {
		XMLName               xml.Name `xml:"ListBucketResult"`
		Contents              []listed
		CommonPrefixes        []prefix
		IsTruncated           bool
		NextContinuationToken string `xml:",omitempty"`
	}{}
	for _, one := range objects {
		if after != "" && one.Name <= after {
			continue
		}
		if len(result.Contents) == limit {
			result.IsTruncated = true
			result.NextContinuationToken = result.Contents[limit-1].Key
			break
		}
		result.Contents = append(result.Contents, listed{
			one.Name, one.Generation, one.Updated.UTC().Format(time.RFC3339Nano), strconv.Quote(one.Etag), one.Size,
		})
	}
	if query.Get("continuation-token") == "" {
		for _, one := range prefixes { // all of them on the first page
			result.CommonPrefixes = append(result.CommonPrefixes, prefix{one})
		}
	}
	answerXML(w, http.StatusOK, result)
}

func answerXML(w http.ResponseWriter, status int, body any) {
	written, err := xml.Marshal(body)
	if err != nil {
		log.Fatal(err)
	}
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	w.Write(written)
}
